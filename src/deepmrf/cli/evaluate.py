"""`deepmrf evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from deepmrf.cli import process
from deepmrf.cli.console import Bars, count, fail, percent, say, sentences, split_scales, table, warn
from deepmrf.cli.options import DeviceOption, FlipOption, NetworkOption, ScalesOption, own_code

if TYPE_CHECKING:
    from deepmrf.evaluation.intervals import Gain, Interval
    from deepmrf.evaluation.metrics import Scores
    from deepmrf.evaluation.videos import VideoScores
    from deepmrf.refine.score import PredictionScores

FEW_IMAGES = 10
"""Of fewer images, or stretches of frames, a sentence says that the interval is not to be trusted."""

EVALUATE_HELP = """Measure a model on labelled images: mIoU, pixel accuracy, and the paper's TA, LA and BA.

TA: in how many images is a class rightly said to be there, or not. LA: how far the boxes around its true and its
predicted pixels overlap. BA: how much of its predicted border is true, where the boxes overlap by half ("-": nowhere).

Several models are averaged. Prints a table; with --out writes scores.json and scores.csv.

[bold]Examples[/bold]

[cyan]deepmrf evaluate runs/fast/model --data camvid:data/camvid --split val[/cyan]

[cyan]deepmrf evaluate street --data cityscapes:data/cityscapes --images 20[/cyan]: a first look

[cyan]deepmrf evaluate runs/a/model runs/b/model --data voc:VOC2012 --scales 0.75 1 1.25 --flip[/cyan]

[cyan]deepmrf evaluate runs/fast/model --data camvid:data/camvid --stages[/cyan]: the network alone, too, and the
MRF's gain with its interval over images: the MRF earns its place where the interval lies above zero

[cyan]deepmrf evaluate camvid --data camvid:data/camvid --pictures seen[/cyan]: seen/index.html, largest gains and worst
failures first

[cyan]deepmrf evaluate saved --data folder:mine --network mynet:build[/cyan]: saved around a network of your own

[cyan]deepmrf evaluate runs/a/model --data cityscapes:data/cityscapes --split test --submission upload[/cyan]: label
maps for the server of Cityscapes or VOC, instead of scores

[cyan]deepmrf evaluate runs/fast/model runs/3d/model --data camvid:data/camvid --video[/cyan]: frames in their order,
with temporal consistency; every model by itself, and models of clips with linked frames and without

[cyan]deepmrf evaluate predictions refined --masks M[/cyan]: saved predictions instead of models, and what the second
folder adds to the first
"""


def evaluate_command(
    models: Annotated[
        list[str],
        typer.Argument(
            help="Trained models: folders, or names such as street; several are averaged. "
            "With --masks, folders of saved predictions."
        ),
    ],
    data: Annotated[
        str | None, typer.Option(help="The data, such as camvid:PATH, voc:PATH or folder:PATH; models need it.")
    ] = None,
    split: Annotated[str, typer.Option(help="Which part of it.")] = "val",
    image_count: Annotated[
        int | None,
        typer.Option("--images", min=1, help="Measure so many images, spread over the split.", show_default="all"),
    ] = None,
    scales: ScalesOption = None,
    flip: FlipOption = False,
    stages: Annotated[
        bool, typer.Option("--stages", help="Also the network alone (b11), and the MRF's gain with its interval.")
    ] = False,
    objects: Annotated[
        bool, typer.Option("--objects", help="Also LA by objects, where the data numbers them (VOC, Cityscapes).")
    ] = False,
    video: Annotated[
        bool, typer.Option("--video", help="Frames in order, with temporal consistency; the default for 3-D models.")
    ] = False,
    device: DeviceOption = None,
    pictures: Annotated[
        Path | None,
        typer.Option(help="Folder for a page of all images: truth, network, model, and where the MRF gains and fails."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for scores.json and scores.csv.")] = None,
    submission: Annotated[
        Path | None,
        typer.Option(help="Folder for label maps as the servers of Cityscapes and VOC take them, instead of scores."),
    ] = None,
    network: NetworkOption = None,
    masks: Annotated[Path | None, typer.Option(help="Folder of true masks, to score saved predictions.")] = None,
    labels: Annotated[
        int | None, typer.Option(help="With --masks: how many labels, where neither labels.json nor predictions tell.")
    ] = None,
) -> None:
    """Measure a model on labelled images."""
    models, factors = split_scales(models, scales or [])
    process.prepare()
    if masks is not None:
        others = (data, image_count, scales, flip, stages, objects, video, device, pictures, submission, network)
        if any(others) or split != "val":
            fail("--masks scores saved predictions: beside it, give --labels and --out alone.")
        _score_predictions(models, masks, labels, out)
        return
    if data is None or labels is not None:
        fail("Models are measured on --data, such as camvid:PATH; folders of predictions on --masks (and --labels).")
    console, title = Console(), f"{data}, {split}"
    facts: dict[str, Any] = {"data": data, "split": split, "models": models}
    with sentences(RuntimeError), own_code(network):
        from deepmrf.data.writing import check_folder
        from deepmrf.evaluation.intervals import ImageConfusions
        from deepmrf.evaluation.models import MODEL, NETWORK, open_models, score_images, score_videos, write_scores
        from deepmrf.evaluation.pictures import Gallery
        from deepmrf.evaluation.submission import write_submission
        from deepmrf.predict.scales import combined
        from deepmrf.predict.segmenter import chosen_device

        for folder, content in ((out, "the scores"), (submission, "the label maps"), (pictures, "the pictures")):
            if folder is not None:  # before minutes are spent
                check_folder(folder, content)
        target = chosen_device(device)
        opened, images = open_models(models, data, split, network)
        video = video or any(model.spans_time for model in opened)
        if video and (image_count or scales or flip or stages or objects or pictures):
            options = "--images, --scales, --flip, --stages, --objects and --pictures"
            raise ValueError(f"{options} are for images: leave them out for videos and models of clips.")
        share = 1.0
        if image_count is not None:
            share = min(image_count / len(images), 1.0)
            images = images.spread(image_count)
        if submission is not None:
            if video or stages or objects or out or pictures:
                raise ValueError("--submission writes label maps of images alone: give no option for scores or videos.")
            with Bars(console) as bars:
                predict = combined([model.to(target) for model in opened], factors, flip)
                paths = write_submission(predict, images, submission, target, bars.progress("label maps"))
            say(f"Wrote {len(paths)} label maps into {paths[0].parent}.", console)
            return
        gallery = None if pictures is None else Gallery(pictures, images.labels)
        confusions = ImageConfusions(images, share) if stages else None
        with Bars(console) as bars:
            if video:
                videos = score_videos(models, opened, images, device=target, phases=bars.progress)
            else:
                scores = score_images(
                    opened,
                    images,
                    scales=factors,
                    flip=flip,
                    network_too=stages or gallery is not None,
                    objects=objects,
                    device=target,
                    phases=bars.progress,
                    shows=[part.add for part in (gallery, confusions) if part is not None],
                )
        page = None if gallery is None else gallery.write(f"{', '.join(models)}: {title}")
    if video:
        _print_videos(videos, title, console)
        facts["video"] = True
    else:
        _print_images({name: scores[name] for name in scores if stages or name == MODEL}, title, console)
        facts |= {"scales": factors, "flip": flip}
        if confusions is not None:
            gain = confusions.gain(NETWORK, MODEL)
            _print_gain(gain, console)
            facts["gain"] = gain.to_dict()
    if page is not None:
        say(f"Wrote {page}", console)
    if out is not None:
        with sentences():
            written = write_scores(out, facts, videos if video else scores)
        say(f"Wrote {written[0]} and {written[1]}", console)


def _score_predictions(folders: list[str], masks: Path, labels: int | None, out: Path | None) -> None:
    """For --masks: print, and write if asked, the scores of saved predictions."""
    console = Console()
    with sentences():
        from deepmrf.data.writing import check_folder
        from deepmrf.evaluation.models import write_scores
        from deepmrf.refine.score import score

        if out is not None:
            check_folder(out, "the scores")
        with Bars(console) as bars:
            report = score(folders, masks, labels, bars.progress)
    warn(report.notes, console)
    _print_images(report.scores, str(masks), console)
    facts: dict[str, Any] = {"predictions": folders, "masks": str(masks)}
    if report.dice:
        facts["dice"] = _print_dice(report, console)
    if report.gain is not None:
        _print_gain(report.gain, console, folders[1])
        if report.dice_gain is not None:
            say(f"{folders[1]} adds {_with_interval(report.dice_gain, 'the mean Dice', 'volumes')}.", console)
        say("Did an MRF learn from these masks? Then it adds less to other images: fit says how much.", console)
        facts["gain"] = report.gain.to_dict()
    if out is not None:
        with sentences():
            written = write_scores(out, facts, report.scores)
        say(f"Wrote {written[0]} and {written[1]}", console)


def _print_images(scores: dict[str, Scores], title: str, console: Console) -> None:
    headings = ("class", "IoU", "accuracy", "TA", "LA", "BA")
    for name, score in scores.items():
        rows = [(str(row[0]), *[percent(value) for value in row[1:]]) for row in score.rows()]
        console.print(table(headings, rows, f"{name}: {title}, {count(score.images, 'image')}"))
        console.print(f"mIoU {percent(score.miou)}, pixel accuracy {percent(score.pixel_accuracy)}")
        if score.la_objects_per_class:
            by_class = zip(score.names, score.la_objects_per_class, strict=True)
            listed = ", ".join(f"{label} {percent(value)}" for label, value in by_class if value == value)
            say(f"LA by objects {percent(score.la_objects)}: {listed}", console)


def _print_dice(report: PredictionScores, console: Console) -> dict[str, Any]:
    """The mean Dice of each label but the first, over volumes; returned as plain numbers."""
    from deepmrf.evaluation.dice import dice_per_label, mean_dice

    dice = {name: (mean_dice(values), dice_per_label(values)) for name, values in report.dice.items()}
    names = next(iter(report.scores.values())).names[1:]
    rows = [(label, *[percent(values[n]) for _, values in dice.values()]) for n, label in enumerate(names)]
    rows.append(("mean", *[percent(value) for value, _ in dice.values()]))
    console.print(table(("Dice", *dice), rows, "Dice, the mean over volumes"))
    return {name: {"mean": value, "per_label": values} for name, (value, values) in dice.items()}


def _print_gain(gain: Gain, console: Console, subject: str = "The MRF") -> None:
    rows = [(name, *_signed(interval)) for name, interval in zip(gain.names, gain.iou_per_class, strict=True)]
    rows += [("mIoU", *_signed(gain.miou)), ("pixel accuracy", *_signed(gain.pixel_accuracy))]
    console.print(table(("IoU", "gain", "low", "high"), rows, f"{subject}: gain"))
    changed = f"{count(gain.better, 'image')} of {gain.images} better, {gain.worse} worse"
    say(f"{subject} adds {_with_interval(gain.miou, 'mIoU', 'images')}: {changed}.", console)
    if 1 < gain.stretches < FEW_IMAGES:
        say("These images are few: other images may gain more or less than the interval says.", console)
    if gain.stretch_frames > 1:
        frames = f"up to {gain.stretch_frames} frames one after the other"
        say(f"Neighbouring frames are alike, so the interval is over {gain.stretches} stretches of {frames}.", console)


def _with_interval(gain: Interval, score: str, things: str) -> str:
    """The gain in a score, "+0.61 to mIoU, 95 % interval ..."; things: of which too few give no interval."""
    value, low, high = _signed(gain)
    interval = f"95 % interval {low} to {high}" if low != "-" else f"no interval: measure more {things}"
    return f"{value} to {score}, {interval}"


def _signed(interval: Interval) -> tuple[str, str, str]:
    value, low, high = (
        "-" if number != number else f"{100 * number:+.2f}" for number in (interval.value, interval.low, interval.high)
    )
    return value, low, high


def _print_videos(videos: dict[str, VideoScores], title: str, console: Console) -> None:
    rows = []
    for name, video in videos.items():
        values = [getattr(video.scores, key) for key in ("miou", "pixel_accuracy", "ta", "la", "ba")]
        rows.append((name, *[percent(value) for value in (*values, video.consistency)]))
    headings = ("", "mIoU", "pixels", "TA", "LA", "BA", "consistency")
    console.print(table(headings, rows, f"{title}, frames in order"))
