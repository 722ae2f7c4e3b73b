"""A whole run: options, data sources, training, metrics, and the page it leaves."""
