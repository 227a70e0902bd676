"""The local SageMaker: CreateTrainingJob and its kin, each job a subprocess under SageMaker's container contract."""
