"""foretune: plan, prove and run the fine-tuning of language models on the hardware a person has."""

__version__ = "0.1.0"

__all__ = ["__version__"]
