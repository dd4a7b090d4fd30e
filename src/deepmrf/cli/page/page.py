"""The page of `deepmrf app`: tabs, the controls of the MRF and the viewer, of Gradio's components."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from deepmrf.cli.page.controls import NAMES, controls
from deepmrf.cli.page.downloads import DOWNLOADS
from deepmrf.cli.page.sessions import OWN, PRESET_NAMES, Session, Sessions
from deepmrf.cli.page.uploads import Inbox

TITLE = "deepmrf"
FOLDER = Path(__file__).parent
PICTURE_SLOTS = [{"label": "Choose a picture or clip", "accept": "image/*,video/*"}]
PREDICTION_SLOTS = [
    {"label": "1. Choose the picture", "accept": "image/*"},
    {"label": "2. Choose its prediction", "accept": ".npy,.npz,.png"},
]
PICTURE_HINT = "or drop it here. It stays on this machine, in memory."
PREDICTION_HINT = (
    "or drop both here. Predictions are probabilities or logits (.npy, .npz), or a label map, a binary mask or a soft "
    "mask (.png)."
)
SIMULTANEOUS_EVENTS = 16
"""Events that are answered at a time; computations wait for each other."""
ERRORS = (ValueError, OSError, KeyError, TypeError, ImportError, MemoryError, RuntimeError)
"""What the viewer shows as a sentence."""
CSS = """
.gradio-container main { max-width: 1320px !important; width: 100% !important; margin: auto; }
footer { display: none !important; }
#title { padding: 4px 2px 0; }
"""


class Tab:
    """A tab with a viewer, a choice of MRFs and their controls; models: names to choose from, or none."""

    def __init__(
        self,
        sessions: Sessions,
        inbox: Inbox,
        owners: dict[str, set[str]],
        slots: Sequence[dict[str, str]],
        hint: str,
        models: Sequence[str] = (),
    ) -> None:
        self.sessions, self.inbox, self.owners = sessions, inbox, owners
        self.session = gr.State("")
        with gr.Row(equal_height=False):
            with gr.Column(scale=3, min_width=320):
                self.viewer = gr.HTML(
                    None,
                    html_template=_asset("viewer.html"),
                    css_template=_asset("viewer.css"),
                    js_on_load=_asset("viewer.js"),
                    apply_default_css=False,
                    slots=list(slots),
                    hint=hint,
                    before="network" if models else "prediction",
                )
                self.frame = gr.Slider(0, 1, 0, step=1, label="Frame", visible=False, buttons=[])
            with gr.Column(scale=1, min_width=280):
                self.model = gr.Dropdown(
                    list(models), value=next(iter(models), None), label="Model", visible=bool(models)
                )
                self.example = gr.Button("Show an example", size="sm", visible=bool(models))
                choices = [OWN] * bool(models) + [f"dense CRF: {name}" for name in PRESET_NAMES]
                self.field = gr.Dropdown(choices, value=choices[0], label="MRF")
                self.sliders = [gr.Slider(0, 1, 0, label=name, visible=False, buttons=[]) for name in NAMES]
                self.reset = gr.Button("Back to its own numbers", size="sm", visible=False)
        self._connect()

    def _connect(self) -> None:
        controlled = [*self.sliders, self.reset, self.frame, self.viewer]
        everything = [self.session, self.field, *controlled]
        live = {"show_progress": "hidden", "concurrency_limit": SIMULTANEOUS_EVENTS, "api_visibility": "private"}
        self.viewer.upload(self._open, [self.model], everything, **live)
        self.example.click(self._show_example, [self.model], everything, **live)
        self.model.select(self._switch, [self.model, self.session], everything, **live)
        changed = [self.session, self.field, self.frame]
        self.field.select(self._choose, changed, controlled, **live)
        self.reset.click(self._choose, changed, controlled, **live)
        for slider in (*self.sliders, self.frame):
            slider.input(self._move, [*changed, *self.sliders], self.viewer, trigger_mode="always_last", **live)

    def _open(self, model: str, event: gr.EventData, request: gr.Request) -> list[Any]:
        def begin() -> str:
            with self.inbox.take([str(key) for key in event.files]) as paths:
                return self.sessions.segment(paths[0], model) if model else self.sessions.refine(*paths)

        return self._begin(begin, request)

    def _show_example(self, model: str, request: gr.Request) -> list[Any]:
        return self._begin(lambda: self.sessions.segment_example(model), request)

    def _switch(self, model: str, session: str, request: gr.Request) -> list[Any]:
        """The same picture by another model."""
        if not session:
            return [gr.skip()] * (len(NAMES) + 5)
        return self._begin(lambda: self.sessions.segment_clip(self.sessions[session].clip, model), request)

    def _begin(self, begin: Callable[[], str], request: gr.Request) -> list[Any]:
        count = len(NAMES) + 4
        try:
            name = begin()
            session = self.sessions[name]
            chosen = next(iter(session.fields))
            view = self._view(name, chosen, 0, {})
        except ERRORS as error:
            return [*[gr.skip()] * count, {"error": _sentence(error)}]
        owned = self.owners[request.session_hash or ""]
        owned.add(name)
        choice = gr.update(choices=list(session.fields), value=chosen)
        return [name, choice, *self._controls(session, chosen, 0), view]

    def _choose(self, name: str, chosen: str, frame: float) -> list[Any]:
        """Another MRF, with its own numbers."""
        if not name:
            return [gr.skip()] * (len(NAMES) + 3)
        view = self._view(name, chosen, frame, {})
        if "error" in view:
            return [*[gr.skip()] * (len(NAMES) + 2), view]
        return [*self._controls(self.sessions[name], chosen, int(frame)), view]

    def _move(self, name: str, chosen: str, frame: float, *values: float) -> Any:
        if not name:
            return gr.skip()
        return self._view(name, chosen, frame, dict(zip(NAMES, values, strict=True)))

    def _view(self, name: str, chosen: str, frame: float, values: dict[str, float]) -> dict[str, Any]:
        try:
            session = self.sessions[name]
            view = session.view(chosen, values, int(frame))
        except ERRORS as error:
            return {"error": _sentence(error)}
        several = len(session.clip.frames) > 1
        files = [file for file in DOWNLOADS if several or file != "overlay.mp4"]
        return view | {"session": name, "name": session.clip.name, "downloads": files}

    def _controls(self, session: Session, chosen: str, frame: int) -> list[Any]:
        """Updates of the sliders, the button to reset them, and the slider of frames."""
        known, count = controls(session.fields[chosen]), len(session.clip.frames)
        sliders = [
            gr.update(
                label=known[name].label,
                minimum=known[name].low,
                maximum=known[name].high,
                step=known[name].step,
                value=round(known[name].value, 2),
                visible=True,
            )
            if name in known
            else gr.update(visible=False)
            for name in NAMES
        ]
        frames = gr.update(maximum=max(count - 1, 1), value=frame, visible=count > 1)
        return [*sliders, gr.update(visible=True), frames]


def build_page(sessions: Sessions, inbox: Inbox) -> gr.Blocks:
    """The page, for one server."""
    owners: dict[str, set[str]] = defaultdict(set)

    def forget(request: gr.Request) -> None:
        """The tab of the browser was closed: so are its sessions."""
        for name in owners.pop(request.session_hash or "", ()):
            sessions.close(name)

    with gr.Blocks(title=TITLE, analytics_enabled=False) as page:
        gr.Markdown("### deepmrf: segment a picture, then move its Markov random field", elem_id="title")
        with gr.Tab("Segment"):
            segment = Tab(sessions, inbox, owners, PICTURE_SLOTS, PICTURE_HINT, sessions.models)
        with gr.Tab("Refine"):
            Tab(sessions, inbox, owners, PREDICTION_SLOTS, PREDICTION_HINT)
        with gr.Tab("What it learned"):
            _add_explanation(sessions, segment)
        page.unload(forget)
    return page


def _add_explanation(sessions: Sessions, segment: Tab) -> None:
    """The tab with the report of `deepmrf explain`: of a model, and of the picture that is shown in the first tab."""

    def explain(model: str, name: str) -> str:
        try:
            report = sessions.explain(model, name)
        except ERRORS as error:
            return f"<p>{html.escape(_sentence(error))}</p>"
        frame = "width: 100%; height: 85vh; border: 0; border-radius: 10px; background: white"
        return (
            f'<iframe title="report" sandbox="allow-scripts" style="{frame}" srcdoc="{html.escape(report)}"></iframe>'
        )

    with gr.Row():
        model = gr.Dropdown(sessions.models, value=sessions.models[0], label="Model")
        button = gr.Button("Explain", variant="primary", scale=0, min_width=200)
    gr.Markdown("Label compatibility, contexts and, of the picture in the first tab, what each layer does to it.")
    report = gr.HTML(min_height=200)
    button.click(explain, [model, segment.session], report, concurrency_limit=2, api_visibility="private")


def _asset(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _sentence(error: BaseException) -> str:
    return str(error.args[0] if isinstance(error, KeyError) and error.args else error) or type(error).__name__
