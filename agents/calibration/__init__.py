"""What is calibrated on held-out samples beside a controller: guards, prices of mean budgets, and
the bundle that is deployed."""
