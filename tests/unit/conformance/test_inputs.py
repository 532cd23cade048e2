"""Inputs fit the models that they are made for: text with places for images, grids of patches, written shapes."""

import pytest
import torch
from torch import nn

from emutpu.conformance import inputs, weights
from emutpu.conformance.agreement import relative_error
from emutpu.conformance.building import build, results_of
from emutpu.conformance.fingerprints import fingerprint
from emutpu.conformance.manifest import programs
from emutpu.conformance.shrink import shrunk
from emutpu.conformance.torchvision_schemas import declare

declare()
transformers = pytest.importorskip("transformers", reason="the library is not installed")


def _runs(name):
    built = build(programs()[name])
    with torch.no_grad():
        return built, built.model(**built.inputs)


@pytest.mark.parametrize(
    "name",
    [
        "transformers/LlavaForConditionalGeneration",
        "transformers/Qwen2VLForConditionalGeneration",
        "transformers/Granite4VisionForConditionalGeneration",  # its features go to several layers
        "transformers/Molmo2ForConditionalGeneration",
    ],
)
def test_text_has_a_place_for_each_feature_of_an_image(name):
    """The image path runs: another image gives other logits."""
    built, answer = _runs(name)
    token = built.model.config.image_token_id
    places = int((built.inputs["input_ids"] == token).sum())
    assert places > 0
    other = {**built.inputs, "pixel_values": built.inputs["pixel_values"] + 1}
    with torch.no_grad():
        changed = built.model(**other)
    assert not torch.allclose(answer.logits, changed.logits)


def test_sound_is_heard():
    """An encoder-decoder of speech takes spectra and the ids of its targets."""
    built, answer = _runs("transformers/WhisperForConditionalGeneration")
    assert set(built.inputs) >= {"input_features", "decoder_input_ids"}
    assert answer.logits.isfinite().all()


def test_a_codec_says_how_many_tokens_a_sound_is():
    """Its codebooks keep nothing of having been asked, which a copy of the model on a device would take along."""
    built, answer = _runs("transformers/CsmForConditionalGeneration")
    token = built.model.config.audio_token_id
    assert (built.inputs["input_ids"] == token).sum(1).tolist() == [2, 2]
    assert answer.logits.isfinite().all()
    fresh = build(programs()["transformers/CsmForConditionalGeneration"]).model
    kept = [vars(part) for part in fresh.codec_model.modules() if "_embed" in vars(part)]
    assert kept
    assert all(state["_embed"] is None for state in kept)


def test_multiple_choice_has_choices():
    """Two of them for each question."""
    built, answer = _runs("transformers/BertForMultipleChoice")
    assert built.inputs["input_ids"].shape == (inputs.BATCH, 2, inputs.LENGTH)
    assert answer.logits.shape == (inputs.BATCH, 2)


@pytest.mark.parametrize(
    ("entry", "shape", "dtype"),
    [
        ([2, 3], (2, 3), torch.float32),
        ({"ones": [2], "dtype": "bool"}, (2,), torch.bool),
        ({"zeros": [1, 4], "dtype": "int64"}, (1, 4), torch.int64),
        ({"tokens": [2, 5], "high": 7}, (2, 5), torch.int64),
        ({"places": [2, 3], "axes": 4}, (6, 4), torch.float32),
        ({"tensor": [1.5]}, (1,), torch.float32),
    ],
)
def test_written_inputs(entry, shape, dtype):
    """Each kind of entry, its shape and its dtype."""
    made = inputs.written(entry, torch.Generator().manual_seed(0))
    assert (tuple(made.shape), made.dtype) == (shape, dtype)


def test_written_lists_and_values():
    """A list is made entry by entry, a value is what it is, and places count rows and columns."""
    generator = torch.Generator().manual_seed(0)
    assert [t.shape for t in inputs.written({"list": [[2], {"ones": [3]}]}, generator)] == [(2,), (3,)]
    assert inputs.written({"value": {"a": None}}, generator) == {"a": None}
    assert inputs.written({"places": [2, 2], "axes": 3}, generator)[:, 1:].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]


def test_matrices_are_not_drawn_while_a_model_is_built():
    """Vectors are what the library makes them; matrices are filled, and drawn afterwards."""
    with weights.Undrawn():
        model = nn.Linear(8, 8)
    assert model.weight.unique().numel() == 1
    assert model.bias.unique().numel() > 1
    weights.draw(model, 1.4, 0)
    assert model.weight.unique().numel() > 1


def test_a_fingerprint_does_not_need_drawn_weights():
    """It is of the ops and their order; sizes and values are none of it."""
    program = programs()["transformers/BertForMaskedLM"]
    prints = {fingerprint(built.model, built.inputs) for built in (build(program), build(program, drawn=False))}
    assert len(prints) == 1


def test_widths_that_have_to_fit_are_kept():
    """Without narrowing only depth, vocabulary and images become small."""
    default = transformers.HGNetV2Config()
    assert shrunk(default, narrow=False).stage_out_channels == default.stage_out_channels
    assert shrunk(default, narrow=False).depths == [2, 2, 2, 2]


def test_sections_of_rotary_embeddings_fill_half_a_head():
    """Also where the configuration leaves them to the model."""
    small = shrunk(transformers.Glm4vTextConfig())
    assert sum(small.rope_parameters["mrope_section"]) == 8


def test_a_backbone_keeps_as_many_stages():
    """Every layer that a neck looks at is there."""
    small = shrunk(transformers.DepthAnythingConfig())
    backbone = small.backbone_config
    assert len(backbone.out_indices) == len(small.neck_hidden_sizes) == 4
    assert backbone.num_hidden_layers == 4


def test_parts_that_are_optional_are_there():
    """Gemma 4 sees and hears: both encoders exist, and the text has the places of what each of them gives."""
    built, answer = _runs("transformers/Gemma4ForConditionalGeneration")
    config, ids = built.model.config, built.inputs["input_ids"]
    kinds = built.inputs["mm_token_type_ids"]
    for token, kind, pixels in (
        (config.image_token_id, 1, "pixel_values"),
        (config.audio_token_id, 3, "input_features"),
    ):
        assert (ids == token).any()
        assert torch.equal(kinds == kind, ids == token)
        with torch.no_grad():
            changed = built.model(**{**built.inputs, pixels: built.inputs[pixels] * 2 + 1})
        assert not torch.allclose(answer.logits, changed.logits)


def test_places_are_counted_by_lengths_where_the_encoder_wants_the_text():
    """MusicFlamingo asks its encoder for the text itself, Qwen2Audio has no method: the lengths of the encoder decide."""
    for name in ("MusicFlamingoForConditionalGeneration", "Qwen2AudioForConditionalGeneration"):
        built, answer = _runs(f"transformers/{name}")
        assert (built.inputs["input_ids"] == built.model.config.audio_token_id).any()
        assert answer.logits.isfinite().all()


def test_pictures_are_cut_into_tiles_of_the_small_image():
    """The resolutions of LLaVA-NeXT are as many small images wide and high as they were."""
    default = transformers.LlavaNextConfig()
    small = shrunk(default)
    before, after = default.vision_config.image_size, small.vision_config.image_size
    assert after < before
    tiles = [[extent // before for extent in pair] for pair in default.image_grid_pinpoints]
    assert [[extent // after for extent in pair] for pair in small.image_grid_pinpoints] == tiles


def test_an_assistant_takes_what_the_larger_model_made():
    """Embeddings and states beside each other, keys and values by type of layer; it cannot generate alone."""
    built, answer = _runs("transformers/Gemma4AssistantForCausalLM")
    assert built.inputs["inputs_embeds"].shape[-1] == 2 * built.model.config.backbone_hidden_size
    assert set(built.inputs["shared_kv_states"]) == {"full_attention", "sliding_attention"}
    assert not built.generates
    assert answer.logits.isfinite().all()


def test_pairs_of_sides_keep_their_ratio():
    """SegGPT's picture is twice as high as wide."""
    height, width = shrunk(transformers.SegGptConfig()).image_size
    assert height == 2 * width == 128


def test_what_one_class_asks_of_its_configuration():
    """Reformer decodes for its language model alone."""
    assert shrunk(transformers.ReformerConfig(), model="ReformerModelWithLMHead").is_decoder
    assert not shrunk(transformers.ReformerConfig(), model="ReformerModel").is_decoder


def test_several_control_networks_are_built_from_their_settings():
    """Two networks, a condition for each."""
    pytest.importorskip("diffusers", reason="the library is not installed")
    built, _ = _runs("diffusers/MultiControlNetModel")
    assert len(built.model.nets) == len(built.inputs["controlnet_cond"]) == 2


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("torchvision/r3d_18", {"x": (1, 3, 8, 64, 64)}),
        ("torchvision/raft_small", {"image1": (1, 3, 128, 128), "image2": (1, 3, 128, 128)}),
        ("torchvision/resnet18", {"x": (2, 3, 64, 64)}),
    ],
)
def test_what_networks_of_torchvision_see(name, shapes):
    """A video, a pair of images, or a batch of images."""
    built = build(programs()[name], drawn=False)
    seen = {name: tuple(value.shape) for name, value in built.inputs.items() if isinstance(value, torch.Tensor)}
    assert seen == shapes


@pytest.mark.parametrize("name", ["PI0Model", "PI0ForConditionalGeneration"])
def test_a_robot_sees(name):
    """Its text has a place for each feature of each camera: another picture is another answer."""
    built = build(programs()[f"transformers/{name}"])
    pixels = built.inputs["pixel_values"]
    with torch.no_grad():
        answers = [results_of(built.model(**{**built.inputs, "pixel_values": seen}))[0] for seen in (pixels, -pixels)]
    assert relative_error(*answers) > 0.01


def test_a_table_has_cells_to_choose():
    """Of a column that Tapas chooses the logits are numbers, and of others ten thousand less."""
    built = build(programs()["transformers/TapasForQuestionAnswering"])
    with torch.no_grad():
        (logits,) = results_of(built.model(**built.inputs))
    cells = logits[:, 4:]
    assert ((cells.abs() < 100).sum(1) == cells.shape[1] // 2).all()
