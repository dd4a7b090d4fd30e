"""`deepmrf predict`: label maps of images, folders and videos."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from deepmrf.cli import process, video
from deepmrf.cli.console import INTERRUPTED, Bars, class_table, fail, say, split_scales, warn, warn_of_failures
from deepmrf.cli.options import DeviceOption, FlipOption, NetworkOption, RayOption, ScalesOption, own_code

if TYPE_CHECKING:
    from deepmrf.data.progress import Progress
    from deepmrf.data.remote import URL
    from deepmrf.predict.report import PredictReport

PREDICT_HELP = """Segment images: a label map, an overlay to look at, and a table of what was found.

Give files, folders, patterns or videos. For photos/x.jpg the folder OUT gets x.png, the label map (8-bit ids with a \
palette), and x_overlay.jpg, with a legend, to look at; results lie as the images do below their common folder.

Results are upright: a camera's EXIF orientation is applied. Of animated files, the first frame is taken. Photographs \
much larger than what the model was trained on are shrunk for the network, and their labels enlarged (--size, --tile).

Of drive.mp4, OUT gets drive_overlay.mp4, with its sound and the times of its frames. Ctrl-C ends it early, and what \
is there plays.

A second run does only what is not done yet with this model and these settings. Files that cannot be read are listed \
at the end, and the exit code is then 1.

[bold]Examples[/bold]

[cyan]deepmrf predict cat.jpg[/cyan]: segmented/cat.png and segmented/cat_overlay.jpg

[cyan]deepmrf predict cat.jpg --open[/cyan]: and show the overlay

[cyan]deepmrf predict cat.jpg --masks[/cyan]: also segmented/cat_cat.png, white where the cat is and black elsewhere

[cyan]deepmrf predict cat.jpg -o labels.png[/cyan]: the label map there, labels_overlay.jpg beside it

[cyan]deepmrf predict photos --recursive -o out --json out/found.json[/cyan]: a folder and all below it

[cyan]deepmrf predict photos --min-area 0.1% --min-confidence 0.5 --coco regions.json[/cyan]: no specks; outlines

[cyan]deepmrf predict 'drive/*.png' --model street --scales 0.75 1 1.25 --flip[/cyan]: slower, better

[cyan]deepmrf predict map.tif --model runs/mine/model --tile 1024[/cyan]: any size, at full resolution

[cyan]deepmrf predict drive.mp4 -o out.mp4 --model street --labels maps[/cyan]: a video, and a label map of each frame

[cyan]deepmrf predict frames -o out.mp4 --fps 30[/cyan]: frames as a video; [cyan]camera:0[/cyan] is a camera

[cyan]deepmrf predict photos --model runs/a/model --model runs/b/model --probabilities[/cyan]: averaged

[cyan]deepmrf predict photos --ray auto[/cyan]: on a Ray cluster; [cyan]--ray[/cyan] alone uses all processors here

[cyan]deepmrf predict s3://bucket/photos -o s3://bucket/out[/cyan]: URLs that fsspec knows, with or without --ray

[cyan]deepmrf predict photos --model saved --network mynet:build[/cyan]: saved around a network of your own
"""


def predict_command(
    inputs: Annotated[list[str], typer.Argument(metavar="INPUT", help="Images, folders, patterns, videos, camera:0.")],
    out_text: Annotated[
        str, typer.Option("--out", "-o", help="Folder for the results; NAME.png of one image, NAME.mp4 of one video.")
    ] = "segmented",
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            show_default="animals",
            help="animals, street, camvid (deepmrf models), folder, OWNER/NAME; repeatable.",
        ),
    ] = None,
    scales: ScalesOption = None,
    flip: FlipOption = False,
    tile: Annotated[
        int | None,
        typer.Option(help="Full resolution, in tiles of this many pixels a side, each seen with its surroundings."),
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(
            show_default="1.25 times its training crops",
            help="Shrink larger images to this longer side for the network; 0 never does.",
        ),
    ] = None,
    device: DeviceOption = None,
    batch: Annotated[int, typer.Option(help="Images of equal size to compute together; helps GPUs.")] = 1,
    overlay: Annotated[bool, typer.Option(help="Write the image with its labels painted over it.")] = True,
    legend: Annotated[
        bool, typer.Option(help="Draw the classes and their colours below or beside overlays and videos.")
    ] = True,
    min_area: Annotated[
        str,
        typer.Option(
            metavar="PIXELS|%",
            show_default="off",
            help="Give regions below this area, such as 50 or 0.1%, to the label around them.",
        ),
    ] = "0",
    min_confidence: Annotated[
        float,
        typer.Option(
            metavar="0..1",
            show_default="off",
            help="Give regions of a lower mean confidence, such as 0.5, to the label around them.",
        ),
    ] = 0.0,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Also write NAME.npz: every label's probability, float16.")
    ] = False,
    masks: Annotated[
        bool,
        typer.Option("--masks", help="Also write NAME_LABEL.png for each label but the background: white on black."),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Do again what is done; replace other files.")] = False,
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="Look into folders of folders.")] = False,
    summary: Annotated[Path | None, typer.Option("--json", help="Write what was found, file by file, as JSON.")] = None,
    coco: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the outlines of all regions as COCO's JSON.")
    ] = None,
    max_pixels: Annotated[
        int | None, typer.Option(show_default="250000000, about 2.6 GB", help="Refuse images of more pixels, unread.")
    ] = None,
    labels: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Videos: write the label map of each frame as a PNG file.")
    ] = None,
    frames: Annotated[
        bool, typer.Option("--frames-as-video", help="Folders hold the frames of a video; implied by -o NAME.mp4.")
    ] = False,
    fps: Annotated[float, typer.Option(help="Frames a second of folders of frames.")] = 25.0,
    max_frames: Annotated[int | None, typer.Option(help="Videos: stop after so many frames.")] = None,
    flow: Annotated[
        str,
        typer.Option(help="Videos: what links frames; dis-fast, dis, or none. Models of clips then see a rigid cube."),
    ] = "dis-fast",
    frame_by_frame: Annotated[
        bool, typer.Option("--frame-by-frame", help="Videos: link no frames, also where the model can; flickers more.")
    ] = False,
    full_precision: Annotated[
        bool, typer.Option("--full-precision", help="Videos: the network in float32, also where bfloat16 is faster.")
    ] = False,
    consistency: Annotated[
        bool, typer.Option("--consistency", help="Videos: how many pixels keep their label along the flow; slower.")
    ] = False,
    network: NetworkOption = None,
    ray: RayOption = None,
    workers: Annotated[
        int | None,
        typer.Option(show_default="one per GPU, or per processor", help="With --ray: processes that hold the model."),
    ] = None,
    open_result: Annotated[
        bool, typer.Option("--open", help="Open the overlay at the end, or the folder of several results.")
    ] = False,
) -> None:
    """Segment images."""
    warnings.filterwarnings("ignore", module=r"PIL(\.|$)")  # of oddities in files that are read all the same
    console = Console(highlight=False)
    inputs, factors = split_scales(inputs, scales or [])
    process.prepare()
    try:
        if workers is not None and ray is None:
            raise ValueError("--workers is for --ray: add --ray, or leave --workers out.")
        for option, path in (("--json", summary), ("--coco", coco)):
            if path is not None:
                _check_json(option, path)
        from deepmrf.data.remote import path_or_url
        from deepmrf.data.writing import write_text
        from deepmrf.predict.coco import write_coco
        from deepmrf.predict.pipeline import Options, segment_files
        from deepmrf.predict.remote import segment_anywhere
        from deepmrf.predict.segmenter import MAX_PIXELS, load

        out: Path | URL = Path(out_text)
        segment: Callable[..., PredictReport] = segment_files
        if any("://" in text for text in (*inputs, out_text)):
            out, segment = path_or_url(out_text), segment_anywhere
        with own_code(network):
            segmenter = load(
                *(model or ["animals"]),
                device=device if ray is None else "cpu",
                scales=factors,
                flip=flip,
                tile=tile,
                size=size,
                max_pixels=MAX_PIXELS if max_pixels is None else max_pixels,
                network=network,
                min_area=_area(min_area),
                min_confidence=min_confidence,
            )
        videos, inputs = video.find_videos(inputs, out, frames)
        if videos:
            _check_for_images(videos[0], probabilities, masks, coco, ray)
        video.check(videos, inputs, out, overlay, labels, flow)
        if open_result and not isinstance(out, Path):
            raise ValueError(f"--open shows files of this machine: leave it out for results at {out}.")
        facts, code = video.predict_videos(
            videos,
            segmenter,
            out,
            overwrite,
            console=console,
            overlay=overlay,
            fps=fps,
            labels=labels,
            flow=None if flow == "none" else flow,
            consistency=consistency,
            max_frames=max_frames,
            frame_by_frame=frame_by_frame,
            full_precision=full_precision,
            legend=legend,
        )
        inputs = [] if code == 130 else inputs
        with Bars(console) as bars:
            options = Options(overlay, probabilities, overwrite, batch, legend, masks)
            images, tiles = _progress(bars)
            if ray is None:
                report = segment(
                    segmenter, inputs, out, recursive=recursive, options=options, progress=images, tile_progress=tiles
                )
            else:
                from deepmrf.refine import cluster

                pool: dict[str, Any] = {"address": ray or None, "workers": workers, "device": device}
                report = cluster.predict(
                    inputs, out, segmenter, options=options, recursive=recursive, progress=images, **pool
                )
            if coco is not None:
                write_coco(coco, report.images, segmenter.labels, bars.progress("outlines"))
        if summary is not None:
            content = {"models": model or ["animals"], **report.to_dict(), "videos": facts.videos}
            content["failed"] = [*facts.failed, *content["failed"]]
            write_text(summary, json.dumps(content, indent=1) + "\n")
    except (ValueError, OSError, TypeError, ImportError) as error:
        fail(error)
    except KeyboardInterrupt:  # while the model is read, kernels are compiled or outlines are drawn
        fail(INTERRUPTED, 130)
    if inputs:
        _show(report, out, coco, console)
    if open_result:
        _open(report, facts.videos, out, console)
    if code or report.failed or report.interrupted:
        raise typer.Exit(130 if report.interrupted else code or 1)


def _progress(bars: Bars) -> tuple[Progress, Progress]:
    """The Progress of the images and of an image's tiles: a single image has a bar of tiles instead."""
    done, total = 0, 0

    def show_images(images_done: int, images: int | None) -> None:
        nonlocal done, total
        done, total = images_done, images or 0
        bars.show("images", done, total)

    def show_tiles(tiles_done: int, tiles: int | None) -> None:
        if total == 1:
            bars.show("tiles", tiles_done, tiles)
        else:
            bars.show("images", done, total, f"tile {tiles_done} of {tiles}")

    return show_images, show_tiles


def _area(text: str) -> float:
    """Pixels, or a share below 1 of "0.1%"."""
    number, is_share = text.strip().removesuffix("%"), text.strip().endswith("%")
    with suppress(ValueError):
        value = float(number) / 100 if is_share else int(number)
        if value >= 0 and (value < 1 or not is_share):
            return value
    raise ValueError(f"--min-area {text} is no area: give pixels, such as 50, or per cent, such as 0.1%.")


def _check_for_images(path: str, probabilities: bool, masks: bool, coco: Path | None, ray: str | None) -> None:
    """Refuse options that are for images alone, where there is a video."""
    if ray is not None:
        raise ValueError(f"{path} is a video, which one machine segments: leave --ray out.")
    if probabilities:
        raise ValueError("--probabilities is for images: those of every frame of a video would fill a disk.")
    if masks:
        raise ValueError("--masks is for images: --labels DIR writes the label map of each frame of a video.")
    if coco is not None:
        raise ValueError("--coco is for images: give the frames as a folder of images, without a video for --out.")


def _show(report: PredictReport, out: Path | URL, coco: Path | None, console: Console) -> None:
    if report.images:
        console.print(class_table(report, "images" if len(report.images) > 1 else ""))
    if report.animated:
        files = "a file has" if len(report.animated) == 1 else f"{len(report.animated)} files have"
        warn([f"{files} several frames: the first was taken ({report.animated[0].name})."], console)
    warn_of_failures([(str(path), reason) for path, reason in report.failed], console)
    if coco is not None and report.images:
        say(f"Wrote the outlines of the regions to {coco}.", console)
    say(_conclusion(report, out), console)


def _conclusion(report: PredictReport, out: Path | URL) -> str:
    """The last line: what was written, or how many images were done, skipped and failed."""
    parts = [(len(report.done), "segmented"), (len(report.earlier), "there already"), (len(report.failed), "failed")]
    counts = ", ".join(f"{count} {state}" for count, state in parts if count)
    if report.interrupted:
        return INTERRUPTED.replace(":", f": {counts};", 1) if counts else INTERRUPTED
    if len(report.done) == 1 and not report.earlier and not report.failed:
        files = report.done[0].files
        *others, last = [f"{path} (to look at)" if path == files.overlay else str(path) for path in files.all()]
        return f"Wrote {', '.join(others)} and {last}." if others else f"Wrote {last}."
    if report.done or report.earlier:
        again = "" if report.done or report.failed else "; --overwrite does them again"
        return f"{counts}: {out if out.suffix.lower() != '.png' else out.parent}{again}."
    return f"Nothing was segmented: {counts}."


def _open(report: PredictReport, videos: Sequence[dict[str, Any]], out: Path | URL, console: Console) -> None:
    """Open the result in the program that the system has for it; of several, open their folder."""
    paths = [image.files.overlay or image.files.labels for image in report.images]
    paths += [Path(video["overlay"] or video["labels"]) for video in videos]
    if len(paths) > 1:
        paths = [out if Path(out).is_dir() else out.parent]
    for path in paths:
        if typer.launch(str(path)):
            warn([f"{path} could not be opened: this system names no program for it."], console)


def _check_json(option: str, path: Path) -> None:
    """Before the work: can the file be written?"""
    from deepmrf.data.writing import is_special

    if is_special(path):
        return
    if re.match(r"\w\w+:/", str(path)):
        raise ValueError(f"{option} is written on this machine: name a file, such as {path.name or 'found.json'}.")
    if path.is_dir():
        raise ValueError(f"{option} {path} cannot be written: name a file, such as {path / 'found.json'}.")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(
            f"{option} {path} cannot be written, as {path.parent} is no folder for it: choose another one."
        )
