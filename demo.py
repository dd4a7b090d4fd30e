"""Pictures to a page, layer by layer: `make demo`, or `make demo IMAGE=yours.jpg`.

The bundled model `animals` segments scikit-image's cat and astronaut (or your pictures) and writes demo-out/index.html:
the photograph, what the network says (b11, averaged over three sizes and the mirror image), the labels after the triple
penalty (b12) and after the label contexts (b13 to b15), where the MRF changed its mind, and how long each layer took.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import sys
import time
import webbrowser
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from deepmrf import figures
from deepmrf.data.files import read_image
from deepmrf.models.names import open_model
from deepmrf.models.parsing_network import DeepParsingNetwork
from deepmrf.predict.scales import mirrored, predictor, scaled

LARGEST = 640
"""Pictures with a longer side than this are reduced: a page is for looking."""
SCALES = (0.75, 1.0, 1.25)
"""Sizes at which the network looks, times that of its training images."""


@dataclass(frozen=True)
class Step:
    """What one layer made of a picture."""

    name: str
    meaning: str
    log_q: torch.Tensor
    """Log-probabilities (L, H, W)."""
    milliseconds: float


def photographs(paths: list[Path]) -> list[tuple[str, np.ndarray]]:
    """The given pictures, or two photographs that come with scikit-image."""
    if not paths:
        from skimage import data

        return [("a cat", data.chelsea()), ("an astronaut", data.astronaut())]
    found = []
    for path in paths:
        picture = Image.fromarray(read_image(path))
        picture.thumbnail((LARGEST, LARGEST))
        found.append((path.name, np.asarray(picture)))
    return found


@torch.inference_mode()
def steps(model: DeepParsingNetwork, photo: np.ndarray) -> list[Step]:
    """The model's layers one after the other, each timed on its second run."""
    image = torch.from_numpy(np.ascontiguousarray(photo.transpose(2, 0, 1)))[None]
    mrf, contexts = model.mean_field, model.mean_field.label_contexts

    def timed(call):  # type: ignore[no-untyped-def]
        call()
        start = time.perf_counter()
        return call(), 1000 * (time.perf_counter() - start)

    trained = max(model.card.recipe["augment"]["crop"])
    look = scaled(predictor(model.log_unary), [s * trained / max(photo.shape) for s in SCALES])
    log_p, unary_time = timed(lambda: mirrored(look)(image).clamp_min(1e-7).log())
    t, penalty_time = timed(lambda: mrf.triple_penalty(mrf.belief(log_p), image))
    penalty, contexts_time = timed(lambda: contexts(t))
    whole = (mrf.tempered(log_p) - penalty).log_softmax(1)
    alone = (mrf.tempered(log_p) - t).log_softmax(1)  # stage 2: label contexts as the identity
    return [
        Step("b1 to b11: network", "the network alone, six looks", log_p[0], unary_time),
        Step("b12: triple penalty", "similar pixels nearby agree", alone[0], penalty_time),
        Step("b13 to b15: label contexts", "labels fit their surroundings: the result", whole[0], contexts_time),
    ]


def picture(array: np.ndarray) -> str:
    """An image as the source of an <img>."""
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, format="JPEG", quality=88)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def changed(photo: np.ndarray, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """The photograph in pale grey, with the pixels whose label changed in red."""
    grey = np.repeat(photo.mean(2, keepdims=True), 3, axis=2) * 0.35 + 160
    grey[before != after] = (214, 39, 40)
    return grey.clip(0, 255).astype(np.uint8)


def section(name: str, photo: np.ndarray, found: list[Step], model: DeepParsingNetwork) -> str:
    """One photograph's row of the page."""
    colours = np.asarray(model.labels.colours, dtype=np.uint8)
    cards = [("photograph", f"{photo.shape[1]} x {photo.shape[0]} pixels", photo)]
    maps = [step.log_q.argmax(0).numpy() for step in found]
    for step, labels in zip(found, maps, strict=True):
        what = f"{step.meaning}, {step.milliseconds:.0f} ms"
        cards.append((step.name, what, figures.overlay(photo, labels, colours)))
    share = float((maps[0] != maps[-1]).mean())
    cards.append(("what the MRF changed", f"{share:.2%} of the pixels", changed(photo, maps[0], maps[-1])))
    figures_html = "".join(
        f"<figure><img src='{picture(image)}' alt='{html.escape(title)}'>"
        f"<figcaption><b>{html.escape(title)}</b><br>{html.escape(text)}</figcaption></figure>"
        for title, text, image in cards
    )
    last = found[-1].log_q.exp()
    rows = []
    for label in np.argsort(-np.bincount(maps[-1].ravel(), minlength=len(colours))):
        here = maps[-1] == label
        if here.any():
            r, g, b = colours[label]
            sure = float(last[int(label)].numpy()[here].mean())
            rows.append(
                f"<tr><td><i style='background:rgb({r},{g},{b})'></i>{html.escape(model.labels.names[label])}</td>"
                f"<td>{here.mean():.1%}</td><td>{sure:.1%}</td></tr>"
            )
    table = f"<table><tr><th>label</th><th>pixels</th><th>confidence</th></tr>{''.join(rows)}</table>"
    return f"<section><h2>{html.escape(name)}</h2><div class='row'>{figures_html}</div>{table}</section>"


STYLE = """
body{font:16px/1.5 system-ui,sans-serif;color:#1c2430;max-width:1500px;margin:2rem auto;padding:0 1.5rem}
h1{margin-bottom:.2rem} h2{margin:2rem 0 .6rem} p{max-width:60rem}
.row{display:grid;grid-template-columns:repeat(auto-fit,minmax(215px,1fr));gap:14px}
figure{margin:0;background:#f4f6f9;border-radius:8px;overflow:hidden} img{width:100%;display:block}
figcaption{padding:.5rem .8rem;font-size:.88rem} table{margin-top:.8rem;border-collapse:collapse}
td,th{padding:.15rem 1.2rem .15rem 0;text-align:left} td:nth-child(n+2),th:nth-child(n+2){text-align:right}
td i{display:inline-block;width:.9rem;height:.9rem;border-radius:3px;margin-right:.5rem;vertical-align:-1px}
code{background:#eef1f5;padding:.1rem .3rem;border-radius:4px}
"""


def page(sections: list[str], name: str, model: DeepParsingNetwork) -> str:
    """The whole page, with everything it shows inside."""
    stages = model.card.metrics.get("val", {})
    alone = [f"{100 * found['miou']:.1f}" for stage, found in stages.items() if stage.endswith("network alone")]
    scores = "; ".join(
        f"{stage}: {100 * found['miou']:.1f}" for stage, found in stages.items() if not stage.endswith("network alone")
    )
    scores += f"; the finished network without its MRF: {alone[-1]}" if alone else ""
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>deepmrf: {name}</title>"
        f"<meta name='viewport' content='width=device-width,initial-scale=1'><style>{STYLE}</style></head><body>"
        f"<h1>deepmrf, layer by layer</h1><p>The bundled model <b>{name}</b> ({', '.join(model.labels.names)}). "
        f"Its validation mIoU after each stage of training: {scores}. Times are of this machine, "
        f"{torch.get_num_threads()} threads, second run. The same from a shell: "
        f"<code>deepmrf predict PICTURE --model {name}</code></p>{''.join(sections)}</body></html>"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", nargs="*", type=Path, help="pictures (default: a cat and an astronaut)")
    parser.add_argument("--model", default="animals", help="a bundled model, or a folder (default: animals)")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder to write (default: demo-out)")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    arguments = parser.parse_args()
    try:
        model = open_model(arguments.model)
        if model.mean_field is None or model.mean_field.label_contexts is None:
            sys.exit(f"{arguments.model} has no label contexts to show: give a model that was trained with them.")
        photos = photographs(arguments.images)
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    arguments.out.mkdir(parents=True, exist_ok=True)
    sections = []
    for name, photo in photos:
        print(f"{name}: {photo.shape[1]} x {photo.shape[0]} ... ", end="", flush=True)
        found = steps(model, photo)
        sections.append(section(name, photo, found, model))
        result = found[-1].log_q.argmax(0).numpy()
        colours = np.asarray(model.labels.colours, dtype=np.uint8)
        shown = Image.fromarray(figures.overlay(photo, result, colours))
        shown.save(arguments.out / f"{Path(name).stem.replace(' ', '-')}.png")
        seen = sorted(((float((result == v).mean()), n) for v, n in enumerate(model.labels.names)), reverse=True)
        print(
            ", ".join(f"{n} {s:.0%}" for s, n in seen if s >= 0.005)
            + "; "
            + ", ".join(f"{step.name.split(':')[0]} {step.milliseconds:.0f} ms" for step in found)
        )
    target = arguments.out / "index.html"
    target.write_text(page(sections, arguments.model, model), encoding="utf-8")
    print(f"Look at {target}.")
    if arguments.open:
        webbrowser.open(target.resolve().as_uri())


if __name__ == "__main__":
    main()
