"""What a user can get wrong. Every message is one sentence: what was got, what is wanted, and the way out."""


class LTX25Error(ValueError):
    """Base of every error this engine raises on purpose."""


class InputError(LTX25Error):
    """A setting, size, prompt or tensor that cannot be used."""


class FileError(LTX25Error):
    """A file that is missing, broken, of another kind, or does not fit the other files."""
