"""How much a step computes and how many sequences run at once, also after a step ran out of memory. Pure."""

from __future__ import annotations

_LEAST_STEP_TOKENS = 16
_STEPS_TO_REGAIN = 64


class StepLimits:
    """`tokens` of a step and `running` sequences; shortages reduce them for some time."""

    def __init__(self, tokens: int, running: int) -> None:
        self.tokens = self._most_tokens = tokens
        self.running = self._most_running = running
        self._steps_since_shortage = 0

    def shorten(self, divisible: bool) -> bool:
        """Makes steps smaller after a shortage; whether that is possible. `divisible`: the step had prompts."""
        self._steps_since_shortage = 0
        if self.tokens <= _LEAST_STEP_TOKENS or not divisible:
            return False
        self.tokens = max(_LEAST_STEP_TOKENS, self.tokens // 2)
        return True

    def regain(self) -> None:
        """Undoes, gradually, what shortages reduced: called after a step that fit."""
        self._steps_since_shortage += 1
        if self._steps_since_shortage % _STEPS_TO_REGAIN == 0:
            self.tokens = min(self._most_tokens, 2 * self.tokens)
            self.running = min(self._most_running, self.running + 1)

    def restore(self) -> None:
        """Undoes all of it, when nothing runs."""
        self.tokens, self.running = self._most_tokens, self._most_running
