"""Where HUD runs tasks: each in the environment that it names, else in the default.

An environment is served once for a session and not once for every rollout, because
booting it costs more than the rollout's own bookkeeping.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from hud.eval.runtime import LocalRuntime, Shared

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from hud.environment import Environment
    from hud.eval.runtime import Provider, Runtime
    from hud.eval.task import Task


class Places:
    """A HUD provider that knows several environments, and keeps them served.

    Args:
        default: Where tasks run whose environment was not added.
        width: Most rollouts at the same time.
    """

    def __init__(self, default: Provider, width: int) -> None:
        self.default = default
        self.width = width
        # HUD reads it off a placement that has one.
        self.runtime_config = getattr(default, "runtime_config", None)
        self._others: dict[str, Provider] = {}
        self._served: dict[asyncio.AbstractEventLoop, Shared] = {}

    def __len__(self) -> int:
        return 1 + len(self._others)

    def __call__(self, task: Task) -> AbstractAsyncContextManager[Runtime]:
        return self._others.get(task.env, self.default)(task)

    def add(self, environment: Environment) -> None:
        """Run the tasks that name this environment in it."""
        self._others[environment.name] = LocalRuntime(environment)

    async def served(self) -> Shared:
        """All of them, served for the event loop that asks, until :meth:`release`."""
        loop = asyncio.get_running_loop()
        for known in [known for known in self._served if known.is_closed()]:
            del self._served[known]
        if loop not in self._served:
            self._served[loop] = await Shared(self, width=self.width).__aenter__()
        return self._served[loop]

    def release(self) -> None:
        """Stop serving, each on the loop that it was served for."""
        for loop, shared in self._served.items():
            if loop.is_closed():
                continue
            leave = shared.__aexit__(None, None, None)
            try:
                loop.call_soon_threadsafe(_start, leave)
            except RuntimeError:  # the loop closed meanwhile, and took the server along
                leave.close()
        self._served.clear()


_TASKS: set[asyncio.Task[None]] = set()


def _start(coroutine: Any) -> None:
    """Run a coroutine on the current loop and keep it referenced until it ends."""
    task = asyncio.get_running_loop().create_task(coroutine)
    _TASKS.add(task)
    task.add_done_callback(_TASKS.discard)
