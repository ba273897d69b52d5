"""The facade: one object for the user's training loop, on one process or many."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from jupyter_accel import collectives, control
from jupyter_accel.data import PreparedLoader
from jupyter_accel.devices import usable_devices
from jupyter_accel.errors import ConfigError, NotPreparedError
from jupyter_accel.precision import Precision
from jupyter_accel.process_group import connect_from_env
from jupyter_accel.scaling import LossScaler
from jupyter_accel.strategies.base import Engine, Strategy, Training
from jupyter_accel.strategies.registry import by_name
from jupyter_accel.training import PreparedOptimizer, PreparedScheduler
from jupyter_accel.world import Environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from jupyter_accel.world import World

T = TypeVar("T")


class OneProcessWarning(UserWarning):
    """Several devices are there, and this process will use one of them."""


class Accelerator:
    """Prepare a training loop's objects for one process or many, and run its steps.

    Each accelerator is its own object: another one in the same process changes nothing here.

    Args:
        mixed_precision: ``no``, ``fp16`` or ``bf16``; what the launcher was told, if not given.
        cpu: compute on the CPU although there is an accelerator.
        device_placement: whether ``prepare`` moves models, and loaders their batches.
        strategy: how to distribute, by name or as an object; ``single`` for one process and
            ``ddp`` for more, if not given.
    """

    def __init__(
        self,
        mixed_precision: str | None = None,
        *,
        cpu: bool = False,
        device_placement: bool = True,
        strategy: str | Strategy | None = None,
    ) -> None:
        env = Environment.from_env(os.environ)
        self._world = _placed(env, cpu=cpu)
        if not (env.launched or control.inside_launch() or cpu):
            _hint_at_launching()
        self._precision = Precision(mixed_precision or env.precision or "no")
        self._precision.check(self._world.device)
        self._strategy = _strategy(strategy, self._world)
        self._place = device_placement
        self._scaler = LossScaler(self._world.device_type) if self._precision.needs_scaler else None
        self._engines: list[Engine] = []
        self._optimizers: list[PreparedOptimizer] = []
        self._schedulers: list[PreparedScheduler] = []
        self._loaders: list[PreparedLoader] = []
        _join_group(self._world)

    # ---------------------------------------------------------------- where we are

    @property
    def world(self) -> World:
        """This process's place in the run."""
        return self._world

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return torch.device(self._world.device)

    @property
    def mixed_precision(self) -> str:
        """The name of the precision in use."""
        return self._precision.name

    @property
    def num_processes(self) -> int:
        """The number of processes of the run."""
        return self._world.size

    @property
    def process_index(self) -> int:
        """The number of this process in the run."""
        return self._world.rank

    @property
    def local_process_index(self) -> int:
        """The number of this process on its machine."""
        return self._world.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first process of the run."""
        return self._world.is_main

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its machine."""
        return self._world.is_local_main

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last process of the run."""
        return self._world.is_last

    # ---------------------------------------------------------------- preparing

    def prepare(self, *objects: Any) -> Any:
        """Make models, optimizers, loaders and schedulers ready; in any order and number.

        One object gives one object, several give a tuple in the order of the call; None stays
        None. Only what has been given can be ready: an optimizer is prepared with its model or
        after it, and a scheduler with its optimizer or after it.
        """
        for thing in objects:
            self._check_kind(thing)
        ready: dict[int, Any] = {}
        self._wrap_models([o for o in objects if isinstance(o, nn.Module)], objects, ready)
        # Optimizers wait for models, and schedulers for optimizers, whatever the order given.
        later: tuple[tuple[type, Callable[[Any], Any]], ...] = (
            (Optimizer, self._wrap_optimizer),
            (DataLoader, self._wrap_loader),
            (LRScheduler, self._wrap_scheduler),
        )
        for kind, wrap in later:
            for thing in objects:
                if isinstance(thing, kind) and id(thing) not in ready:
                    ready[id(thing)] = wrap(thing)
        results = tuple(None if thing is None else ready[id(thing)] for thing in objects)
        return results[0] if len(results) == 1 else results

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """Give the model that the user built."""
        for engine in self._engines:
            if model is engine.model:
                return engine.unwrap()
        return model

    # ---------------------------------------------------------------- training

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Use this in place of ``loss.backward()``."""
        self._engine_of(None).backward(loss, **options)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Do not exchange this model's gradients in the backward passes inside the block."""
        for engine in self._engines:
            if model in (engine.model, engine.unwrap()):
                return engine.no_sync()
        msg = f"{type(model).__name__} is not prepared here; call accelerator.prepare(model) first"
        raise NotPreparedError(msg)

    def clip_grad_norm_(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
    ) -> torch.Tensor:
        """Scale gradients down to at most this norm, and return the norm they had."""
        chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if self._scaler is not None:
            wanted = set(map(id, chosen))
            for optimizer in self._optimizers:
                if wanted & _parameter_ids(optimizer):
                    self._scaler.unscale(optimizer.optimizer)
        return self._engine_of(chosen).clip(chosen, max_norm, norm_type)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether an optimizer left out its last step because a gradient overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    def autocast(self) -> AbstractContextManager[None]:
        """Compute in the chosen precision inside the block; a prepared model does so by itself."""
        return self._precision.autocast(self._world.device_type)

    # ---------------------------------------------------------------- together

    def gather(self, tree: T) -> T:
        """Join each tensor of all processes along its first dimension."""
        return collectives.gather(tree, self._world)

    @property
    def stopped(self) -> bool:
        """Whether the user stopped the job and a training loop has ended for it, on all ranks."""
        return control.stopped()

    def wait_for_everyone(self) -> None:
        """Wait until all processes are here."""
        collectives.wait_for_all(self._world)

    def print(self, *values: Any, **options: Any) -> None:
        """Print once in the whole run, however many processes there are."""
        if self.is_main_process:
            print(*values, **options)  # noqa: T201 - the user's own output

    def __getattr__(self, name: str) -> Any:
        if name in _LATER:
            msg = f"Accelerator.{name} is not in this version of jupyter-accel; {_LATER[name]}"
            raise AttributeError(msg)
        msg = f"'Accelerator' object has no attribute {name!r}"
        raise AttributeError(msg)

    # ---------------------------------------------------------------- inside

    def _check_kind(self, thing: Any) -> None:
        if thing is None or isinstance(thing, (nn.Module, Optimizer, DataLoader, LRScheduler)):
            return
        msg = (
            "prepare() takes models, optimizers, DataLoaders and learning rate schedulers; got "
            f"{type(thing).__name__}"
        )
        raise ConfigError(msg)

    def _wrap_models(
        self, models: Sequence[nn.Module], objects: Sequence[Any], ready: dict[int, Any]
    ) -> None:
        optimizers = [_bare(o) for o in objects if isinstance(o, Optimizer)]
        for model in models:
            known = next((e for e in self._engines if model in (e.model, e.unwrap())), None)
            ready[id(model)] = known.model if known else self._wrap_model(model, optimizers)

    def _wrap_model(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> nn.Module:
        if isinstance(model, DistributedDataParallel):
            msg = (
                "this model is wrapped by DistributedDataParallel already, by another Accelerator "
                "or by hand; prepare the model inside it, model.module, in a new process"
            )
            raise ConfigError(msg)
        self._precision.check_model(model)
        mine = set(map(id, model.parameters()))
        training = Training(
            model,
            tuple(o for o in optimizers if mine & _parameter_ids(o)),
            self._precision,
            self._scaler,
            self._place,
        )
        engine = self._strategy.wrap(training, self._world)
        self._engines.append(engine)
        return engine.model

    def _wrap_optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        known = next((o for o in self._optimizers if o.optimizer is _bare(optimizer)), None)
        if known is not None:
            return known
        bare = _bare(optimizer)
        prepared = {id(p) for engine in self._engines for p in engine.unwrap().parameters()}
        strangers = _parameter_ids(bare) - prepared
        # Alone, a stray parameter does no harm; on several ranks its copies would drift apart.
        if strangers and (self._world.size > 1 or not _parameter_ids(bare) & prepared):
            msg = (
                f"{type(bare).__name__} holds {len(strangers)} parameters of no prepared model; "
                "call accelerator.prepare(model, optimizer) with the model that it was built from"
            )
            raise NotPreparedError(msg)
        self._optimizers.append(PreparedOptimizer(bare, self._scaler))
        return self._optimizers[-1]

    def _wrap_loader(self, loader: DataLoader[Any]) -> PreparedLoader:
        if loader in self._loaders:
            return self._loaders[self._loaders.index(loader)]
        source = loader.source if isinstance(loader, PreparedLoader) else loader
        self._loaders.append(PreparedLoader(source, self._world, place=self._place))
        return self._loaders[-1]

    def _wrap_scheduler(self, scheduler: LRScheduler) -> PreparedScheduler:
        if scheduler in self._schedulers:
            return self._schedulers[self._schedulers.index(scheduler)]
        bare = scheduler.scheduler if isinstance(scheduler, PreparedScheduler) else scheduler
        target = _bare(bare.optimizer)
        optimizer = next((o for o in self._optimizers if o.optimizer is target), None)
        if optimizer is None:
            msg = (
                f"the optimizer of {type(bare).__name__} is not prepared; call "
                "accelerator.prepare(model, optimizer, scheduler) with all three"
            )
            raise NotPreparedError(msg)
        self._schedulers.append(PreparedScheduler(bare, optimizer))
        return self._schedulers[-1]

    def _engine_of(self, parameters: Sequence[torch.Tensor] | None) -> Engine:
        """Find the engine of these parameters, or the first one that learns."""
        if not self._engines:
            msg = "no model is prepared yet; call accelerator.prepare(model, optimizer) first"
            raise NotPreparedError(msg)
        wanted = set(map(id, parameters or ()))
        for engine in self._engines:
            mine = engine.unwrap().parameters()
            if wanted & set(map(id, mine)) if wanted else engine.training.learns:
                return engine
        return self._engines[0]


#: What users of Accelerate will look for; said plainly, rather than silently left out.
_LATER = {
    "accumulate": "call optimizer.step() every n-th step, inside no_sync(model) until then",
    "gather_for_metrics": "use gather(), and loader.valid to leave out padding",
    "reduce": "use gather(x).mean() or .sum()",
    "pad_across_processes": "pad before gather()",
    "save_state": "use torch.save on the main process",
    "load_state": "use torch.load",
    "save_model": "use torch.save(accelerator.unwrap_model(model).state_dict(), path)",
    "save": "use torch.save on the main process",
    "skip_first_batches": "it comes with checkpoints",
    "init_trackers": "log from the main process",
    "log": "log from the main process",
    "split_between_processes": "use items[process_index::num_processes]",
    "main_process_first": "use is_main_process and wait_for_everyone()",
    "free_memory": "delete your own names",
}


def _placed(env: Environment, *, cpu: bool) -> World:
    """Choose the device: what was asked for, else what the launcher chose, else the best."""
    world = env.world
    if cpu:
        return replace(world, device="cpu")
    if env.device is not None or not torch.accelerator.is_available():
        return world
    kind = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    if kind is None:
        return world
    if world.local_rank >= count:
        msg = (
            f"local rank {world.local_rank} has no device of its own: {count} on this machine for "
            f"{world.local_size} ranks; launch {count}, or use cpu=True"
        )
        raise ConfigError(msg)
    return replace(world, device=f"{kind.type}:{world.local_rank}")


def _strategy(wanted: str | Strategy | None, world: World) -> Strategy:
    if isinstance(wanted, Strategy):
        return wanted
    return by_name(wanted or ("single" if world.size == 1 else "ddp"))


def _join_group(world: World) -> None:
    """Join the other ranks, unless a launcher has done it."""
    if dist.is_available() and dist.is_initialized():
        size = dist.get_world_size()
        if size != world.size:
            msg = (
                f"the process group has {size} ranks, but RANK and WORLD_SIZE in the environment "
                f"say {world.size}; set torchrun's four variables in every rank"
            )
            raise ConfigError(msg)
    elif world.size > 1:
        connect_from_env(world)
    if world.device_type == "cuda":
        torch.cuda.set_device(world.device)


def _hint_at_launching() -> None:
    """Say how to use all devices, where a lone process would leave some idle."""
    devices = usable_devices(os.environ)
    if devices.count > 1:
        _hint_once(devices.count)


@cache
def _hint_once(count: int) -> None:
    message = (
        f"{count} devices are visible and this process will use one; put %%accel_launch at the "
        f"top of the cell that trains, or call jupyter_accel.launch, to use all {count}"
    )
    warnings.warn(message, OneProcessWarning, stacklevel=4)


def _bare(optimizer: Optimizer) -> Optimizer:
    return optimizer.optimizer if isinstance(optimizer, PreparedOptimizer) else optimizer


def _parameter_ids(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}
