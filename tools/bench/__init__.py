"""Performance as ratios: ``python -m tools.bench`` measures each case beside its baseline, alternately, in one process.

Every case runs in a fresh process of its own. A round times the subject and its baseline one right after the other; the
figure of a case is the median over rounds of their ratio, which survives a noisy machine where two separate medians
would not.
"""
