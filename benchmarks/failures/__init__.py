"""Real runs that failed in known ways, and what ``hpctrain explain`` says of each."""
