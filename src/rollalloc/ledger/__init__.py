"""What each prompt did under which model, in one file that outlives runs and frameworks."""
