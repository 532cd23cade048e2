"""``emutpu regions``: what was recorded becomes one document, and the document becomes a report.

``collect``   runs the program and joins the recordings of its processes;
``analysis``  what changed between similar regions, steps, modelled cost, the summary;
``advice``    what to do about it, with evidence;
``terminal``, ``page``, ``trace``, ``export``, ``compare``  the reports.
"""
