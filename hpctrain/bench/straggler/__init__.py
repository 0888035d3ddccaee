"""Whether the monitor finds what it should: slow-downs put into recorded healthy traces."""
