"""The tenants of this stage. What is deployed has them in this place (core.domain.tenants.stage_module)."""

TENANTS = "{}"  # as a stage without a configuration file has them
