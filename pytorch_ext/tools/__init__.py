"""What one runs beside training: explanations, checks, measurements and the planner. No layer imports them."""
