"""Counts of the tiers beside the first two, from given answers."""

import math

from emutpu.conformance import gates, tiers

ROWS = {"a": 80, "b": 3, "c": 1}


def answer(program, mode="strict", outcome="pass", **more):
    """What a worker answers, as far as it is counted here."""
    return {"program": program, "mode": mode, "outcome": outcome, "error": None} | more


def test_distribution():
    """Quantiles are values that occurred; what is not finite is counted apart."""
    found = tiers.distribution([math.inf, *(n / 100 for n in range(1, 101))])
    assert found == {"count": 101, "infinite": 1, "quantiles": {"0.5": 0.5, "0.9": 0.9, "0.99": 0.99, "1": 1.0}}
    assert tiers.distribution([])["quantiles"]["0.5"] is None


def test_noise():
    """Of programs that were attempted, with why some have none; bounded runs measure nothing."""
    found = tiers.noise(
        [
            answer("a", logit_noise=1e-6, gradient_noise=2e-6, logit_error=3e-6, default_error=0.01),
            answer("b", logit_noise=None, noise_error="RuntimeError: no Double", logit_error=1e-6),
            answer("c", outcome="corpus bug", logit_noise=9.0),
            answer("a", "bounded", logit_error=9.0),
        ]
    )
    assert found["cpu_logits"] == tiers.distribution([1e-6])
    assert found["device_logits"] == tiers.distribution([3e-6, 1e-6])
    assert found["without_float64"] == {"RuntimeError: no Double": 1}
    assert found["limits"] == {
        "logits": gates.LOGITS,
        "gradients": gates.GRADIENTS,
        "default_precision": gates.DEFAULT_PRECISION,
        "perplexity": gates.PERPLEXITY,
    }


def test_default_precision():
    """In rows and programs, each miss with its reason; modes that do not measure it do not count."""
    found = tiers.default_precision(
        [
            answer("a", tier3=True),
            answer("b", tier3=False, tier3_error="not finite\nmore"),
            answer("c", "defer", tier3=None),
        ],
        ROWS,
    )
    assert found == {
        "attempted": {"rows": 83, "programs": 2},
        "passed": {"rows": 80, "programs": 1},
        "failed": {"b": "not finite"},
    }


def test_bounded():
    """None without the mode; corpus bugs are not attempted; executables are counted."""
    assert tiers.bounded([answer("a")], ROWS) is None
    found = tiers.bounded(
        [
            answer("a", "bounded", executables=1),
            answer("b", "bounded", "crash", error="refused", executables=None),
            answer("c", "bounded", "corpus bug"),
        ],
        ROWS,
    )
    assert found == {
        "attempted": {"rows": 83, "programs": 2},
        "passed": {"rows": 80, "programs": 1},
        "failed": {"b": "refused"},
        "executables": {"1": 1},
    }


def test_perplexity():
    """Of those that have one."""
    told = {"cpu_perplexity": 7.5, "perplexity": 7.4}
    assert tiers.perplexity([answer("a"), answer("b", **told)]) == [
        {"program": "b", "mode": "strict", "cpu": 7.5, "device": 7.4, "default": None}
    ]
