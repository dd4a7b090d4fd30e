"""HTML pages of pictures: files without anything from a network, which open with a double click."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Iterable
from pathlib import Path

from PIL import Image

from deepmrf.data.files import Bytes
from deepmrf.figures.window import WindowKernel

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1c2430; max-width: 76rem; margin: 2rem auto; padding: 0 1.5rem }
h1 { margin-bottom: .2rem } h2 { margin: 2.4rem 0 .6rem } p { max-width: 50rem }
.row { display: flex; flex-wrap: wrap; gap: 18px; align-items: flex-start }
figure { margin: 0; background: #f4f6f9; border-radius: 8px; padding: 10px; max-width: 36rem }
figure.wide { max-width: none } figure img { max-width: 100%; display: block; background: white }
figcaption { padding: .5rem .2rem 0; font-size: .9rem }
code { background: #eef1f5; padding: 0 .3rem; border-radius: 4px }
"""
WINDOW_SCRIPT = """
document.querySelectorAll("figure.window").forEach(figure => {
  const n = JSON.parse(figure.dataset.kernel), image = figure.querySelector("img");
  const [photo, map] = figure.querySelectorAll("canvas"), text = figure.querySelector("output");
  const [m, k] = n.window, zoom = Math.max(3, Math.floor(330 / Math.max(m, k)));
  const draw = (x, y) => {
    const ink = photo.getContext("2d", {willReadFrequently: true});
    const width = photo.width = image.naturalWidth, height = photo.height = image.naturalHeight;
    ink.drawImage(image, 0, 0);
    const data = ink.getImageData(0, 0, width, height).data;
    const at = (a, b, c) => data[4 * (b * width + a) + c] / 255, values = [];
    let most = 1e-12;
    for (let dy = -Math.floor(m / 2); dy < m - Math.floor(m / 2); dy++)
      for (let dx = -Math.floor(k / 2); dx < k - Math.floor(k / 2); dx++) {
        const a = x + dx, b = y + dy;
        if (a < 0 || b < 0 || a >= width || b >= height || (!dx && !dy)) { values.push(0); continue }
        let colour = 0;
        for (let c = 0; c < 3; c++) colour += (at(x, y, c) - at(a, b, c)) ** 2;
        const far = (dy * n.spacing[0]) ** 2 + (dx * n.spacing[1]) ** 2;
        const sum = n.colour * colour + n.position * far;
        const d = !n.gaussian ? sum
          : Math.exp(-sum) + n.smooth_weight * Math.exp(-far / (2 * n.smooth_width ** 2));
        values.push(d); most = Math.max(most, d);
      }
    map.width = k * zoom; map.height = m * zoom;
    const paint = map.getContext("2d");
    values.forEach((d, i) => {
      const s = Math.round(255 * d / most);
      paint.fillStyle = `rgb(${s}, ${Math.round(34 + 0.8 * s)}, ${Math.round(78 - 0.1 * s)})`;
      paint.fillRect((i % k) * zoom, Math.floor(i / k) * zoom, zoom, zoom);
    });
    paint.strokeStyle = "white";
    paint.strokeRect(Math.floor(k / 2) * zoom, Math.floor(m / 2) * zoom, zoom, zoom);
    ink.strokeStyle = "yellow"; ink.lineWidth = 2;
    ink.strokeRect(x - Math.floor(k / 2), y - Math.floor(m / 2), k, m);
    text.textContent = `pixel ${x}, ${y}: the largest d(j, z) is ${most.toPrecision(3)}`;
  };
  const start = () => draw(...n.pixel);
  image.complete ? start() : image.addEventListener("load", start);
  photo.addEventListener("click", event => {
    const box = photo.getBoundingClientRect();
    draw(Math.floor((event.clientX - box.left) * photo.width / box.width),
         Math.floor((event.clientY - box.top) * photo.height / box.height));
  });
});
"""


def page(title: str, introduction: str, sections: Iterable[tuple[str, str]], script: str = "") -> str:
    """Return a page with these (heading, HTML) sections. title and headings are plain text; introduction is HTML."""
    body = "".join(f"<h2>{html.escape(heading)}</h2>{content}" for heading, content in sections)
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{html.escape(title)}</title>"
        f"<meta name='viewport' content='width=device-width,initial-scale=1'><style>{STYLE}</style></head><body>"
        f"<h1>{html.escape(title)}</h1><p>{introduction}</p>{body}"
        + (f"<script>{script}</script>" if script else "")
        + "</body></html>\n"
    )


def embedded_figure(png: Path, svg: Path, caption: str) -> str:
    """Return a figure with the PNG inside the page, and links to both files beside it."""
    source = base64.b64encode(png.read_bytes()).decode()
    links = f"<a href='{html.escape(png.name)}'>PNG</a>, <a href='{html.escape(svg.name)}'>SVG</a>"
    return (
        f"<figure><img src='data:image/png;base64,{source}' alt='{html.escape(caption, quote=True)}'>"
        f"<figcaption>{html.escape(caption)} {links}</figcaption></figure>"
    )


def linked_figure(file: str, caption: str) -> str:
    """Return a figure whose picture is a file beside the page."""
    text = html.escape(caption)
    return f"<figure class='wide'><img src='{html.escape(file)}' alt='{text}'><figcaption>{text}</figcaption></figure>"


def clickable_window(image: Bytes, pixel: tuple[int, int], kernel: WindowKernel) -> str:
    """Return the image (H, W, 3) as a picture to click into: WINDOW_SCRIPT then draws b12's weights at that pixel."""
    content = io.BytesIO()
    Image.fromarray(image).save(content, format="PNG")
    source = base64.b64encode(content.getvalue()).decode()
    numbers = html.escape(json.dumps({**vars(kernel), "pixel": pixel}), quote=True)
    return (
        f"<figure class='window wide' data-kernel=\"{numbers}\">"
        f"<img style='display:none' src='data:image/png;base64,{source}' alt=''>"
        "<div class='row'><canvas style='cursor:crosshair;max-width:100%'></canvas><canvas></canvas></div>"
        "<figcaption>Click into the image: b12's window there (yellow), and d(j, z) of the pixels in it; brighter is "
        "larger. <output></output></figcaption></figure>"
    )
