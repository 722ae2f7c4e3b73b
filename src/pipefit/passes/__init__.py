"""Passes: functions Program → Program, one task each. `pipefit.passes.build` chains them in the correct order."""
