"""For tests, ours and those of users: the meaning of the query language in plain Python, and faults
for the simulated store."""
