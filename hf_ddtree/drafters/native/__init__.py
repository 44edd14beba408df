"""DFlash drafters that Transformers has a model class for."""
