"""A whole run: options, data sources, training, metrics, and its report page."""
