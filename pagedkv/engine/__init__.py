"""The step loop: schedule, plan, run, sample, publish."""
