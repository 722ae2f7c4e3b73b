"""What a run left in its folder, as one page."""

from pipefit.report.page import write_report

__all__ = ["write_report"]
