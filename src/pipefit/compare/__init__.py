"""Every strategy of training on the ranks at hand, measured side by side in one run."""
