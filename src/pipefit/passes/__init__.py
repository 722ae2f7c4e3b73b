"""Program → Program, one thing each. `pipefit.passes.build` chains them in the one order that makes sense."""
