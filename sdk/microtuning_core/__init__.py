"""What all parts must agree on: pure rules and records in `domain`, the boto3 stores in `aws`."""
