"""What a job asks of AWS itself. Only here is boto3 imported, and only when a spec names something that needs it.

The job's role must allow it: lambda:InvokeFunction on the functions that the stage names, secretsmanager:GetSecretValue on
the judges' keys.
"""
