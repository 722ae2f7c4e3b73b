"""What pipefit publishes about its own speed, as functions that run anywhere; `pipefit bench` prints them."""
