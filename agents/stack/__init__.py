"""Network and predictors weighted, the guard, and mean budgets."""
