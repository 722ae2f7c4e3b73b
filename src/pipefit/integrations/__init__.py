"""pipefit inside of other libraries' training loops."""
