"""One Lambda function a file, named after what wakes it; each a dozen lines over a use case of microtuning_core."""
