"""How a run scales: measured at several sizes, fitted, and what more nodes would be worth."""
