"""The Stop button of a running job: a stock widget, shown only if the job runs for a while."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets

_VIEW = "application/vnd.jupyter.widget-view+json"


class StopButton:
    """A button that asks a job to stop; a second click ends it.

    Args:
        headline: the state line, shown beside the button.
        stop: called at each click; must only set a flag, since it may run in another thread.
    """

    def __init__(self, headline: str, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._button = ipywidgets.Button(
            description="Stop",
            tooltip="End the loop after this step and keep the model so far",
            layout=ipywidgets.Layout(width="auto"),
        )
        self._button.on_click(self._clicked)
        label = ipywidgets.Label(headline)
        layout = ipywidgets.Layout(align_items="center")
        self._box = ipywidgets.HBox([self._button, label], layout=layout)
        self._all = (self._box, self._button, label)

    def bundle(self) -> Mapping[str, Any]:
        """Return the representation that a live front end prefers."""
        model = {"version_major": 2, "version_minor": 0, "model_id": self._box.model_id}
        return {_VIEW: model}

    def close(self) -> None:
        """Take the widgets away."""
        for widget in self._all:
            for part in (widget.layout, getattr(widget, "style", None)):
                if part is not None:
                    part.close()
            widget.close()

    def _clicked(self, _button: object) -> None:
        self._button.description = "Stop now"
        self._button.tooltip = "End the ranks at once"
        self._stop()
