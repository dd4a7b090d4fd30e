"""The command `deepmrf bench`, or `python -m benchmarks.bench` in a checkout: reads options, prints the table.

It runs as a plain program: no environment variables, no malloc settings, nothing that a user's program does not have.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.bench import Results, Row, Settings, plan, report, run

PAPER = "The paper gives 30 ms for b12 and 75 ms for b12-b15: ten 512 x 512 images, 21 labels, a GPU of 2015."

app = typer.Typer(rich_markup_mode="rich", add_completion=False)

BENCH_HELP = """Measure every layer in time and memory, beside its peers, in one run.

Prints a table (median of repeats after a warm-up; the cases take turns), writes results.json and plot.png.

[bold]Examples[/bold]

[cyan]deepmrf bench --quick[/cyan]: small images, a few seconds. Does it run here?

[cyan]deepmrf bench[/cyan]: 512 x 512, 21 labels, on the CPU; some minutes.

[cyan]deepmrf bench --device cuda[/cyan]: ten images at a time, as in the paper.

[cyan]deepmrf bench --implementations[/cyan]: plain PyTorch and compiled kernels apart.

[cyan]deepmrf bench --large --no-scaling[/cyan]: also 4096 x 4096, if the memory holds it.

[bold]Peers[/bold]: pydensecrf2 (pip install pydensecrf2), the direct window loop, a windowed CRF by unfolding and
box sums, the last three in plain PyTorch. A figure that was extrapolated says so.
"""


@app.command(name="bench", help=BENCH_HELP)
def bench_command(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    size: Annotated[int | None, typer.Option(help="Side of the square images. [512, with --quick 48]")] = None,
    labels: Annotated[int | None, typer.Option(help="Number of labels. [21, with --quick 4]")] = None,
    batch: Annotated[int | None, typer.Option(help="Images at a time. [1, on cuda 10]")] = None,
    dtype: Annotated[str, typer.Option(help="float32, float64, bfloat16 or float16.")] = "float32",
    threads: Annotated[int | None, typer.Option(help="CPU threads. [PyTorch's choice, with --quick 1]")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small images and few repeats: a few seconds.")] = False,
    implementations: Annotated[
        bool,
        typer.Option("--implementations", help="Also force each implementation: torch, numba (cpu), triton (cuda)."),
    ] = False,
    scaling: Annotated[bool, typer.Option(help="Grow pixels, labels and window, and plot.")] = True,
    memory: Annotated[bool, typer.Option(help="Measure peak memory; on the CPU a fresh process per case.")] = True,
    large: Annotated[bool, typer.Option("--large", help="Also 4096 x 4096 on the CPU, if it fits the memory.")] = False,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    image: Annotated[str, typer.Option(help="photo, generated or noise: dense CRF's time depends on it.")] = "photo",
    out: Annotated[
        Path | None, typer.Option(help="Folder to write into; benchmarks/results/DATE-DEVICE if not given.")
    ] = None,
) -> None:
    """Measure every layer beside its peers."""
    console = Console()
    try:
        settings = Settings.of(
            device,
            size=size,
            labels=labels,
            batch=batch,
            dtype=dtype,
            threads=threads,
            quick=quick,
            implementations=implementations,
            scaling=scaling,
            memory=memory,
            large=large,
            seed=seed,
            image=image,
        )
    except ValueError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    results = Results(settings, plan(settings))
    try:
        _run_with_progress(results, console)
    except KeyboardInterrupt:
        console.print("Interrupted: this is what was measured so far.")
    _show(results, console)
    _save(results, out or Path("benchmarks/results") / f"{datetime.date.today()}-{device}", console)
    if not results.finished:
        raise typer.Exit(130)


def _run_with_progress(results: Results, console: Console) -> None:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=results.steps)

        def step(words: str) -> None:
            progress.update(task, advance=1, description=words)

        run(results, step)


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.{0 if value >= 0.1 else 1 if value >= 1e-2 else 2}f} ms"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.{1 if value >= 10 else 2}f}"


def _note(row: Row, results: Results) -> str:
    ratio = results.over_forward(row)
    parts = [
        "NOISY" if row.noisy else "",
        f"{ratio:.1f} x its forward pass" if ratio else "",
        f"one call alone: {_seconds(row.alone_s)}" if row.queued > 1 else "",
        row.note,
        row.skipped and f"skipped: {row.skipped}",
    ]
    return "; ".join(part for part in parts if part)


def _table(results: Results, axis: str, title: str) -> Table:
    """The rows that were reached, ours above the peers."""
    baseline, batch = results.baseline, results.settings.batch
    table = Table(title=title, title_justify="left", title_style="bold", pad_edge=False, box=None, header_style="dim")
    table.add_column("")
    table.add_column("runs on")
    for heading in ("time", "±", *["per image"] * (batch > 1)):
        table.add_column(heading, justify="right", no_wrap=True)
    against = f"x faster than {baseline.case.name}" if baseline is not None else "x faster"
    table.add_column(against, justify="right")
    table.add_column("memory / q", justify="right")
    table.add_column("note")
    for peers in (False, True):
        for row in results.on(axis):
            if row.case.peer != peers or not (row.repeats_s or row.skipped):
                continue
            forced = " (forced)" if row.case.implementation and not row.case.peer else ""
            cells = [row.case.name, row.chosen + forced, _seconds(row.seconds)]
            cells.append("" if row.spread is None else f"{row.spread:.0%}")
            cells += [_seconds(row.seconds_per_image)] * (batch > 1)
            cells += [_ratio(results.times_faster(row) if axis == "table" else None), _ratio(row.memory_over_q)]
            table.add_row(*cells, _note(row, results), style="" if not peers else "yellow")
        table.add_section()
    return table


def _show(results: Results, console: Console) -> None:
    settings = results.settings
    maps = f"{settings.batch} x {settings.labels} labels x {settings.size} x {settings.size}, {settings.dtype}"
    # A file or a pipe has no width to fit into: cells must not be cut there.
    wide = console if console.is_terminal else Console(width=200, file=console.file)
    wide.print(_table(results, "table", f"{settings.device}: {maps} (peers in yellow)"))
    if results.on("large"):
        wide.print(_table(results, "large", f"large: 1 x {settings.labels} labels x 4096 x 4096"))
    if any(row.noisy for row in results.rows):
        load = " to ".join(f"{value:.1f}" for value in results.load)
        console.print(f"NOISY: repeats differ by more than a fifth (load {load}); quote no figure of these, run again.")
    if settings.device == "cuda":
        console.print(PAPER)


def _save(results: Results, folder: Path, console: Console) -> None:
    console.print(f"Wrote {report.write(results, folder)}", soft_wrap=True)
    try:
        if report.plot(results, folder / "plot.png"):
            console.print(f"Wrote {folder / 'plot.png'}", soft_wrap=True)
    except ImportError:
        console.print("No plot: matplotlib is not installed (pip install matplotlib).")


if __name__ == "__main__":
    app(prog_name="deepmrf bench")
