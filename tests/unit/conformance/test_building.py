"""Small models keep the code path, and their weights let a fault show."""

import copy
import math
import sys

import pytest
import torch
from torch import nn

from emutpu.conformance import building, inputs, weights
from emutpu.conformance.building import NoRecipe, loss_of, results_of
from emutpu.conformance.manifest import programs
from emutpu.conformance.shrink import shrunk
from emutpu.conformance.torchvision_schemas import declare

declare()
transformers = pytest.importorskip("transformers", reason="the library is not installed")


@pytest.mark.parametrize(
    ("model_type", "queries", "shared"), [("mistral", 4, 2), ("llama", 4, 4), ("qwen3_moe", 4, 2), ("gemma", 4, 4)]
)
def test_heads_keep_the_kind_of_their_ratio(model_type, queries, shared):
    """Grouped queries stay grouped, one key-value head for each query head stays so."""
    small = shrunk(transformers.CONFIG_MAPPING[model_type]())
    assert (small.num_attention_heads, small.num_key_value_heads) == (queries, shared)


def test_multi_query_stays():
    """One key-value head is a path of its own."""
    default = transformers.GemmaConfig(num_key_value_heads=1)
    assert shrunk(default).num_key_value_heads == 1


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "olmoe"])
def test_experts_are_chosen_among(model_type):
    """More experts than a token goes to, or the router would have no choice."""
    small = shrunk(transformers.CONFIG_MAPPING[model_type]())
    experts = getattr(small, "num_local_experts", None) or small.num_experts
    assert experts > small.num_experts_per_tok >= 2


def test_every_type_of_layer_occurs():
    """Gemma 3 has a full layer after five with a window; the window is shorter than the sequence."""
    small = shrunk(transformers.Gemma3TextConfig())
    assert set(small.layer_types) == {"sliding_attention", "full_attention"}
    assert small.num_hidden_layers == len(small.layer_types) >= 2
    assert small.sliding_window < inputs.LENGTH


def test_layers_named_by_letters_are_cut_too():
    """The configuration around the text's names its layers by a string: as many stay as every kind of them takes."""
    small = shrunk(transformers.CONFIG_MAPPING["nemo_speechlm"]())
    kinds = {"M": "linear_attention", "E": "moe", "*": "full_attention"}
    assert small.text_config.layers_block_type == [kinds[letter] for letter in "MEMEM*"]


def test_odd_stays_odd_and_kernels_stay():
    """An odd number of patches a side, and what a convolution does."""
    assert shrunk(transformers.CLIPVisionConfig()).image_size // 32 == 3
    assert shrunk(transformers.ViTConfig()).image_size // 16 == 4
    default = transformers.Wav2Vec2Config()
    assert shrunk(default).conv_kernel == default.conv_kernel


def test_special_tokens_fit_the_vocabulary():
    """Ids beyond the small vocabulary become other, distinct ids."""
    small = shrunk(transformers.BartConfig())
    assert small.vocab_size == 511  # the full-size one is odd
    special = (small.pad_token_id, small.bos_token_id, small.eos_token_id)
    assert len(set(special)) == 3
    assert max(special) < small.vocab_size


def test_an_encoder_decoder_can_start():
    """Generation needs a first token, which T5 keeps elsewhere."""
    assert shrunk(transformers.T5Config()).decoder_start_token_id == 0


def test_no_dropout_is_left():
    """Neither in a configuration nor in a module."""
    small = shrunk(transformers.BertConfig())
    assert (small.hidden_dropout_prob, small.attention_probs_dropout_prob) == (0.0, 0.0)
    model = nn.Sequential(nn.Dropout(0.5), nn.LSTM(3, 3, 2, dropout=0.5))
    weights.without_dropout(model)
    assert model[0].p == model[1].dropout == 0.0


class ToyGumbelVectorQuantizer(nn.Linear):
    """Draws its choice in training."""

    def forward(self, x):
        y = super().forward(x)
        return nn.functional.gumbel_softmax(y, hard=True) if self.training else y


def test_choices_are_not_drawn():
    """What draws its choice in training makes it, also in a copy of the model; the rest is trained."""
    model = nn.Sequential(ToyGumbelVectorQuantizer(8, 4), nn.Linear(4, 4))
    weights.without_dropout(model)
    copied = copy.deepcopy(model)
    for each in (model, copied):
        each.train()
        assert (each[0].training, each[1].training) == (False, True)
        each.eval()
        assert not each[1].training
    x = torch.ones(2, 8)
    assert torch.equal(copied.train()(x), copied(x))
    assert copied[0].train() is copied[0]


class Branch(nn.Module):
    """A layer scale that switches a branch off, a zero-initialised matrix, a decay, a normalisation."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 1e-5))
        self.zero = nn.Linear(8, 400)
        nn.init.zeros_(self.zero.weight)
        self.decay = nn.Parameter(torch.arange(8.0))
        self.register_buffer("codes", torch.zeros(400, 8))
        self.norm = nn.BatchNorm2d(8)
        self.conv = nn.Conv2d(8, 64, 3, groups=2)


def test_drawn_weights():
    """Standard deviation by fan-in, branches on, no code like another, vectors with a shape of their own untouched."""
    model = Branch()
    weights.draw(model, 1.4, 0)
    assert model.zero.weight.std().item() == pytest.approx(1.4 / math.sqrt(8), rel=0.1)
    assert model.conv.weight.std().item() == pytest.approx(1.4 / math.sqrt(4 * 9), rel=0.1)
    assert model.codes.std().item() == pytest.approx(1.4 / math.sqrt(8), rel=0.1)
    assert model.scale.abs().min() > 0.2
    assert torch.equal(model.decay, torch.arange(8.0))
    assert model.norm.weight.std() > 0
    assert model.norm.running_var.std() > 0


def test_normalisations_let_a_signal_pass():
    """Scales that a library draws around zero become scales around one; those of what is no normalisation stay."""
    model = Branch()
    nn.init.normal_(model.norm.weight, std=0.02)
    weights.draw(model, 1.4, 0)
    assert model.norm.weight.mean().item() == pytest.approx(1.0, abs=0.15)
    assert 0 < model.norm.weight.std() < 0.3


def test_a_weight_depends_on_its_name_alone():
    """Two draws agree, and another module before it changes nothing."""
    first, second = Branch(), Branch()
    second.more = nn.Linear(2, 2)
    weights.draw(first, 1.4, 0)
    torch.manual_seed(99)
    weights.draw(second, 1.4, 0)
    assert torch.equal(first.zero.weight, second.zero.weight)


def test_unknown_arguments_are_named():
    """A model that needs what no recipe makes is a gap of the suite."""

    class Odd(nn.Module):
        config = transformers.BertConfig()

        def forward(self, moon_phase):
            return moon_phase

    with pytest.raises(inputs.UnknownArgument, match="moon_phase"):
        inputs.for_signature(Odd(), 0)


@pytest.mark.parametrize("builder", sorted(building._BUILDERS))
def test_a_library_that_is_not_installed(monkeypatch, builder):
    """Not run, with the reason; that is no crash."""
    program = next(program for program in programs().values() if program.builder == builder)
    for name in [builder, *(name for name in sys.modules if name.startswith(f"{builder}."))]:
        monkeypatch.setitem(sys.modules, name, None)  # parts that an earlier test imported are there without the whole
    with pytest.raises(NoRecipe, match=f"{builder} is not installed here"):
        building.build(program)


def test_results_and_loss():
    """The model's own loss wins; caches are no results."""
    logits = torch.ones(2, 3, requires_grad=True)
    answer = {"loss": logits.sum(), "logits": logits, "past_key_values": torch.zeros(5)}
    assert [r.shape for r in results_of(answer)] == [(2, 3)]
    assert loss_of(answer) == 6
    assert loss_of({"logits": logits * 2}) == 4
    assert loss_of({"logits": logits.detach()}) is None


def test_what_is_normalised_has_a_gradient():
    """The sum of its squares is constant: features weigh differently. One result may be a number."""
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    loss = loss_of(torch.nn.functional.layer_norm(x, (8,)))
    loss.backward()
    assert loss.dtype == torch.float64
    assert x.grad.norm() > 0.01
    assert loss_of((x * 2).sum().square().sqrt()) is not None


def test_towers_of_timm_are_short_too():
    """The image network in Gemma 3n says nothing of its depth: of its 84 blocks each kind stays."""
    model = building.build(programs()["transformers/Gemma3nModel"]).model
    tower = model.vision_tower.timm_model
    assert sum(len(stage) for stage in tower.blocks) < 30
    assert {type(block).__name__ for stage in tower.blocks for block in stage} == {
        "EdgeResidual",
        "MobileAttention",
        "UniversalInvertedResidual",
    }
