"""Compiled models: a training step equals CPU's, with the graphs and launches it should have; the same step twice compiles nothing."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from families import CASES
from training import assert_close, assert_same_step, misses, move, sgd, train_step

from emutpu.backend.runtime import runtime


@dataclasses.dataclass(frozen=True, slots=True)
class Expected:
    """Graphs after the first step and in all, and regions launched by a step: a forward and a backward for each graph.

    ``breaks`` are those of the model's own code.
    """

    graphs: int = 1
    later: int = 1
    launches: int = 2
    breaks: int = 0
    smoke: bool = False


# BERT and ViT of transformers write config.problem_type in the first step, which their second is guarded by; Mixtral
# installs hooks in the first call, under a lock that Dynamo cannot enter.
EXPECTED = {
    "bert": Expected(later=2, smoke=True),
    "llama": Expected(),
    "t5": Expected(),
    "vit": Expected(later=2),
    "whisper": Expected(),
    "mixtral": Expected(graphs=2, later=2, launches=4, breaks=8),
    "mamba": Expected(),
    "resnet18": Expected(),
    "resnet50": Expected(),
    "convnext": Expected(),
    "vit-timm": Expected(),
    "swin": Expected(),
    "unet": Expected(),
    "lstm": Expected(smoke=True),
}


@pytest.fixture(autouse=True)
def fresh():
    """No compiled frames and no counts from the test before."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if e.smoke else [pytest.mark.nightly]) for n, e in EXPECTED.items()]
)
def test_a_compiled_training_step(name):
    """Forward, gradients and updates at 'highest'; counts of graphs, breaks and launches; the third step compiles nothing."""
    family, expected = CASES[name], EXPECTED[name]
    case = family.build()
    host, inputs = move(case, "cpu")
    reference = train_step(host, inputs, case, sgd(host))
    model, inputs = move(case, "tpu")
    optimizer = sgd(model)
    model.forward = torch.compile(model.forward)
    counters = torch._dynamo.utils.counters
    # The optimizer runs eagerly: in DEFER_AND_FUSE its regions would be counted with the graphs' launches.
    strict = torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_NEVER)
    with strict, torch.tpu.precision(torch.tpu.Precision.HIGHEST):
        assert_same_step(train_step(model, inputs, case, optimizer), reference)
        assert counters["stats"]["unique_graphs"] == expected.graphs
        assert sum(counters["graph_break"].values()) == expected.breaks
        if name == "mixtral":  # an update may send tokens to other experts: new sizes, new modules
            for group in optimizer.param_groups:
                group["lr"] = 0.0
        train_step(model, inputs, case, optimizer)
        steady, launched = misses(), runtime().region_launches
        train_step(model, inputs, case, optimizer)
        assert misses() == steady, "the third identical step compiled again"
        assert runtime().region_launches - launched == expected.launches
        assert counters["stats"]["unique_graphs"] == expected.later


@pytest.mark.timeout(600)
def test_llama_prefill_and_cached_decoding():
    """One graph for the prompt, one for all further tokens over a static cache; logits equal CPU's."""
    transformers = pytest.importorskip("transformers", reason="install emutpu[models]")
    case = CASES["llama"].build()
    model = case.model.eval()
    tokens = case.inputs["input_ids"][:, :8]

    def decode(device: str) -> list[torch.Tensor]:
        mine = copy.deepcopy(model).to(device)
        cache = transformers.StaticCache(config=mine.config, max_cache_len=16)
        forward = torch.compile(mine.forward) if device == "tpu" else mine.forward
        logits = []
        with torch.no_grad():
            given = tokens.to(device)
            for start in (0, 8, 9, 10):
                position = torch.arange(start, start + given.shape[1]).to(device)
                out = forward(
                    input_ids=given, past_key_values=cache, cache_position=position, position_ids=position[None]
                )
                logits.append(out.logits[:, -1].cpu())
                given = out.logits[:, -1:].argmax(-1)
                counts.append(misses())
        return logits

    counts: list[int] = []
    expected = decode("cpu")
    counts.clear()
    with torch.tpu.precision(torch.tpu.Precision.HIGHEST):
        actual = decode("tpu")
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e, 1e-4, "logits")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert counts[-1] == counts[-2]
