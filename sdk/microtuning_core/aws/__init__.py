"""The boto3 stores: each wraps one service, speaks the domain's records, and translates errors at this edge once."""
