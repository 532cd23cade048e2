"""``emutpu fuzz``: ``schedule`` draws perturbations, ``running`` runs the program under them, ``outputs`` compares what it
printed, ``minimise`` finds the few that a failure needs.
"""
