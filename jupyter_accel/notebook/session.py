"""Everything that lives as long as the extension is loaded in a kernel."""

from __future__ import annotations

import atexit
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jupyter_accel.launcher import provider
from jupyter_accel.launcher.preflight import DeviceWatch
from jupyter_accel.launcher.template import PRELOAD, WARM, Template
from jupyter_accel.notebook.awaiting import Transformer
from jupyter_accel.notebook.kept import KeptWorkers
from jupyter_accel.notebook.magics import AccelMagics, worded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from IPython.core.interactiveshell import InteractiveShell

    from jupyter_accel.launcher.launching import Launcher
    from jupyter_accel.launcher.presenting import Presenter

_RANK_SHELL = "jupyter_accel.notebook.rank_shell:prepare"
_REHEARSE = "jupyter_accel.notebook.rank_shell:rehearse"


class Session:
    """The extension in one kernel.

    Args:
        shell: the kernel's shell.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        self.kept = KeptWorkers()
        self._watch = DeviceWatch()
        self._transformer = Transformer(lambda: bool(shell.autoawait), self._parse)
        self._magics = AccelMagics(shell, self)
        self._launcher: Launcher | None = None
        self._template: Template | None = None

    def start(self) -> None:
        """Register everything, and start the template in the background."""
        shell = self.shell
        self._template = Template.start(preload=(*PRELOAD, _RANK_SHELL), warm=(_REHEARSE, *WARM))
        provider.use(lambda: self.launcher, self._present)
        shell.input_transformers_cleanup.append(self._transformer)
        shell.register_magics(self._magics)
        shell.events.register("pre_run_cell", self._before_cell)
        shell.events.register("post_run_cell", self._after_cell)
        self._watch.start()
        atexit.register(self.close)

    @property
    def launcher(self) -> Launcher:
        """What starts ranks; loaded when it is first needed."""
        if self._launcher is None:
            from jupyter_accel.launcher.launching import Launcher  # noqa: PLC0415 - slow to load
            from jupyter_accel.launcher.records import default_folder  # noqa: PLC0415

            self._launcher = Launcher(
                preload=(*PRELOAD, _RANK_SHELL),
                warm=(_REHEARSE, *WARM),
                records_folder=default_folder(os.environ),
                watch=self._watch,
                prepare_fork=_adopt_kernel,
                template=self._template,
            )
        return self._launcher

    def close(self) -> None:
        """End every process of ours and unregister everything."""
        atexit.unregister(self.close)
        self.kept.close_all()
        provider.forget()
        if self._launcher is not None:
            self._launcher.close()
            self._launcher = None
        elif self._template is not None:
            self._template.close()
        self._template = None
        known = self.shell.magics_manager.magics
        for kind, own in self._magics.magics.items():
            known[kind] = {name: at for name, at in known[kind].items() if own.get(name) != at}
        if self._transformer in self.shell.input_transformers_cleanup:
            self.shell.input_transformers_cleanup.remove(self._transformer)
        for event, function in (
            ("pre_run_cell", self._before_cell),
            ("post_run_cell", self._after_cell),
        ):
            if function in self.shell.events.callbacks[event]:
                self.shell.events.unregister(event, function)

    # Launches

    async def run(self, line: str, body: str | None, *, skipped: int = 1) -> Any:
        """Run a cell or an expression on every rank, awaited."""
        from jupyter_accel.notebook import following  # noqa: PLC0415
        from jupyter_accel.notebook.launch_run import LaunchRun  # noqa: PLC0415

        cell = self._read(line, body, skipped)
        if cell is None:
            return None
        with worded():
            if cell.options.launch.start_method != "fork":
                await following.wait_ready(self.launcher.template())
            with LaunchRun(self.shell, self.launcher, self.kept, cell) as run:
                await following.follow(run.job, run.presenter, run.wishes, run.offer_button)
                return run.result()

    def run_blocking(
        self, line: str, body: str | None, local: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a cell or an expression where nothing can be awaited: no button, all else alike.

        Args:
            line: what follows the magic.
            body: the cell below it, or None for an expression.
            local: the variables of the function that launches.
        """
        from jupyter_accel.launcher.stopping import interrupts_to  # noqa: PLC0415
        from jupyter_accel.notebook import following  # noqa: PLC0415
        from jupyter_accel.notebook.launch_run import LaunchRun  # noqa: PLC0415

        cell = self._read(line, body, 1)
        if cell is None:
            return None
        if local is not None and local is not self.shell.user_ns:
            cell = replace(cell, local=local)
        run = LaunchRun(self.shell, self.launcher, self.kept, cell)
        with worded():
            self.launcher.get_ready(cell.options.launch)
            with interrupts_to(run.wishes), run:
                following.follow_blocking(run.job, run.presenter, run.wishes)
                return run.result()

    def _read(self, line: str, body: str | None, skipped: int) -> Any:
        from jupyter_accel.notebook import cell  # noqa: PLC0415
        from jupyter_accel.notebook.options import MagicOptions, help_text  # noqa: PLC0415

        with worded():
            read = cell.read(self.shell, line, body, skipped=skipped)
        if isinstance(read, MagicOptions):
            print(help_text())  # noqa: T201 - asked for
            return None
        return read

    def _present(self, size: int) -> Presenter:
        from jupyter_accel.notebook.publishing import Publisher  # noqa: PLC0415
        from jupyter_accel.notebook.show import CallPresenter  # noqa: PLC0415

        return CallPresenter(Publisher(self.shell), size)

    def _parse(self, body: str) -> None:
        self.shell.compile.ast_parse(self.shell.transform_cell(body))

    def _before_cell(self, _info: object = None) -> None:
        self._watch.before()

    def _after_cell(self, result: Any = None) -> None:
        info = getattr(result, "info", None)
        raw = (getattr(info, "raw_cell", "") or "").strip()
        count = getattr(result, "execution_count", None) or self.shell.execution_count
        self._watch.after(f"In [{count}]", raw.partition("\n")[0])


def _adopt_kernel() -> None:
    from jupyter_accel.notebook.rank_shell import adopt_kernel  # noqa: PLC0415

    adopt_kernel()
