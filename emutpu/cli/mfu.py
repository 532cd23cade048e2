"""``emutpu mfu``: what share of the chip's peak a throughput is, by every way of counting."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from emutpu.cli._exit import EmulatorExit, EmulatorFailure
from emutpu.cli._output import console, json_option, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from emutpu._report import Document

__all__ = ["command"]

_CONTEXTS = ("causal", "full")
_HEADS = ("with_lm_head", "without_lm_head")


@click.command("mfu", short_help="FLOP accounting of a model against a throughput.")
@click.argument("model", required=False)
@click.option("--list", "list_models", is_flag=True, help="List the models that are known by name.")
@click.option("--sequence", type=click.IntRange(min=1), help="Tokens per sequence.")
@click.option("--tokens-per-second", "tokens", type=click.FloatRange(min=0, min_open=True), help="The throughput.")
@click.option("--chip", "chip_name", default="v7", show_default=True, help="The chip whose peak is the measure.")
@click.option(
    "--per", type=click.Choice(["chip", "device", "core"]), default="chip", show_default=True,
    help="What the throughput is of: a chip, a device, or a TensorCore.",
)  # fmt: skip
@click.option("--dtype", default="bf16", show_default=True, help="Whose peak counts: bf16, int8, fp8, int4, fp4.")
@click.option("--training/--forward", default=True, show_default=True, help="A training step, or prefill alone.")
@click.option(
    "--lm-head/--no-lm-head", default=True, show_default=True, help="Whether the headline counts the LM head."
)
@click.option(
    "--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write a page to try the choices."
)
@json_option("Write the accounting as JSON; '-' is standard output.")
def command(
    model: str | None,
    list_models: bool,
    sequence: int | None,
    tokens: float | None,
    chip_name: str,
    per: str,
    dtype: str,
    training: bool,
    lm_head: bool,
    html: Path | None,
    json_path: str | None,
) -> None:
    """Count the FLOP of MODEL (a known name, a Hugging Face config.json, or a file of our own fields) per token.

    With --tokens-per-second, give the model FLOP utilisation too: causal and full attention, with and without LM head.
    """
    from emutpu.simulator.chips import chip
    from emutpu.simulator.mfu import MODELS, components, load_model, peak_flops

    terminal = console(stderr=json_path == "-")
    if list_models:
        for name in MODELS:
            terminal.print(name, markup=False)
        return
    if model is None or sequence is None:
        raise click.UsageError("give a MODEL and --sequence, or --list")
    try:
        spec = chip(chip_name)
        found = load_model(model)
        parts = components(found, sequence)
        peak = peak_flops(spec, dtype=dtype, per=per)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    from emutpu._report import header

    choices: dict[str, Any] = {
        "model": found.name, "sequence": sequence, "tokens_per_second": tokens, "per": per, "dtype": dtype,
        "training": training, "lm_head": lm_head, "peak_flops": peak,
    }  # fmt: skip
    document = header("mfu", spec.name) | choices | _accounting(parts, choices)
    _print(document, terminal)
    if html is not None:
        _write_page(document, html)
        terminal.print(f"page: {html}", markup=False)
    if json_path is not None:
        write_json(document, json_path)


def _accounting(parts: Any, choices: dict[str, Any]) -> Document:
    """FLOP per token and MFU in all four ways, and the parts they are made of."""
    import dataclasses

    from emutpu.simulator.mfu import mfu

    by_head: Document = {name: {"flops_per_token": {}, "mfu": {}} for name in _HEADS}
    for head, context in itertools.product(_HEADS, _CONTEXTS):
        flops = parts.total(causal=context == "causal", lm_head=head == "with_lm_head", training=choices["training"])
        tokens = choices["tokens_per_second"]
        by_head[head]["flops_per_token"][context] = flops
        by_head[head]["mfu"][context] = None if tokens is None else mfu(flops, tokens, choices["peak_flops"])
    notes = {"mfu": "no --tokens-per-second was given"} if choices["tokens_per_second"] is None else {}
    if not parts.lm_head:
        notes["lm_head"] = "the model's vocabulary is not known, so its LM head counts nothing"
    headline: Document = by_head["with_lm_head" if choices["lm_head"] else "without_lm_head"]
    return headline | by_head | {"components": dataclasses.asdict(parts), "notes": notes}


def _print(document: Document, terminal: Console) -> None:
    from rich.table import Table

    what = "training step" if document["training"] else "forward pass"
    table = Table(
        title=f"{document['model']}, {document['sequence']:,} tokens, {what}, on TPU {document['chip']} "
        f"({document['peak_flops'] / 1e12:,.1f} T {document['dtype']} per {document['per']})",
        title_justify="left",
    )
    table.add_column("counted")
    table.add_column("GFLOP per token", justify="right")
    table.add_column("MFU", justify="right", style="bold")
    for head, context in itertools.product(_HEADS, _CONTEXTS):
        share = document[head]["mfu"][context]
        table.add_row(
            f"{context} attention, {head.replace('_', ' ').replace('lm', 'LM')}",
            f"{document[head]['flops_per_token'][context] / 1e9:,.2f}",
            "-" if share is None else f"{share:.1%}",
        )
    terminal.print(table)
    for note in document["notes"].values():
        terminal.print(f"note: {note}", markup=False)


def _write_page(document: Document, path: Path) -> None:
    from emutpu.cli._mfu_page import page

    try:
        path.write_text(page(document), encoding="utf-8")
    except OSError as error:
        raise EmulatorFailure(EmulatorExit.REPORT_NOT_WRITTEN, f"the page was not written: {error}") from error
