"""vLLM as a model's engine: the computation and the sampling are vLLM's, all above them is the predictor's own.

The process of such an engine runs in an interpreter that has vLLM (`__main__.py`). There the engine of this package
(engine/engine.py) queues, schedules and ends sequences as for its own runners; in place of a runner, `VllmComputer`
(`computer.py`) computes the steps with vLLM. See docs/engines.md for what differs.
"""
