"""Results of a recipe: tables and report.html."""
