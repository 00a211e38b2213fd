"""Search and proof: bounds on what any plan can reach."""
