"""The one exception that stands for a mistake of the user's."""


class UserError(Exception):
    """A bad flag, file, key or prompt. The message is one sentence that names it.

    Programs print the message without a traceback and exit with status 1; anything else that
    escapes is a defect of ours and keeps its traceback.
    """
