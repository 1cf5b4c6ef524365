"""What is said about generated antibodies: functions over sequences and arrays, no model and no trainer."""
