"""The schedules of the house, registered in the order of the papers."""

__all__: list[str] = []
