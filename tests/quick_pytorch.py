"""PyTorch without work that no test needs."""

import torch
import torch._dynamo.guards
import torch._dynamo.utils


def hasten() -> None:
    """After each compilation, Dynamo flushes the processor's caches to time the guards, collects
    garbage, and writes out all settings for a log that nobody keeps. Each seed is queued, with a
    stack trace, for devices that are not there.
    """
    torch._dynamo.config.run_gc_after_compile = False
    torch._dynamo.guards.profile_guard_manager = lambda manager, scope, times: 0.0
    torch._dynamo.utils._scrubbed_inductor_config_for_logging = lambda: None
    torch._dynamo.utils._get_dynamo_config_for_logging = lambda: None
    if not torch.cuda.is_available():
        for device in (torch.cuda, torch.xpu, torch.mtia):
            device.manual_seed_all = lambda seed: None
