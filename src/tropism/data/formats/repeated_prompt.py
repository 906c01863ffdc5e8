"""Completions that repeat the prompt: public data sets have whole conversations beside a column `prompt`."""

from dataclasses import replace

from tropism.data.formats import fields
from tropism.data.formats.context import leading_system
from tropism.data.formats.fields import Content
from tropism.data.formats.format import Draft
from tropism.data.formats.plain_records import draft_of_conversation, draft_of_conversations
from tropism.data.rows import Dropped, Message, Reason
from tropism.errors import DataError

Messages = tuple[Message, ...]


def without_repeated_prompt(draft: Draft, place: str) -> Draft | Dropped:
    """A draft whose completions are what follows the prompt.

    A conversation may repeat the prompt or its last turns, or contain it after turns that the prompt lacks: a system
    message, or earlier turns where `prompt` is the last user turn. Then the prompt gets these turns. Plain text is
    unchanged.

    Raises:
        DataError: if prompt and conversation have different system messages.
    """
    conversations = {name: side for name, side in draft.completions.items() if isinstance(side, tuple) and side}
    if not conversations:
        return draft
    prompt = fields.as_messages(draft.prompt, "user")
    if not prompt:
        return _own_prompt(draft, conversations, place)
    completions: dict[str, Content] = dict(draft.completions)
    prompts: list[Messages] = []
    for name, side in conversations.items():
        before, rest = _cut(prompt, side)
        if before is None:
            if _is_other_conversation(prompt, side):
                return Dropped(place, Reason.NO_COMPLETION,
                               f"'{name}' begins with role {fields.short_repr(side[0]['role'])} but does not contain "
                               "the prompt. If it is a complete conversation, ignore the column 'prompt' with "
                               "--columns unused=prompt.")
            continue
        completions[name] = rest
        prompts.append(_merged(before, prompt, name, place))
    if any(_differ(prompts[0], other) for other in prompts[1:]):
        return Dropped(place, Reason.NO_COMPLETION,
                       "the two sides have different messages before the prompt, so they do not share a prompt")
    longer = prompts and len(prompts[0]) > len(prompt)
    return replace(draft, prompt=prompts[0] if longer else draft.prompt, completions=completions)


def _own_prompt(draft: Draft, conversations: dict[str, Messages], place: str) -> Draft | Dropped:
    """A draft with an empty prompt, whose conversations begin with their own."""
    if len(conversations) < len(draft.completions) or any(
            side[0].get("role") == "assistant" or side[-1].get("role") != "assistant"
            for side in conversations.values()):
        return draft
    if len(conversations) == 2:
        found = draft_of_conversations(conversations, place)
    else:
        ((name, messages),) = conversations.items()
        found = draft_of_conversation(messages, name, draft.desirable, place)
    return replace(found, tools=draft.tools) if isinstance(found, Draft) else found


def _cut(prompt: Messages, side: Messages) -> tuple[Messages | None, Messages]:
    """The messages of a conversation before the prompt, and those after it; (None, all) without the prompt."""
    for count in range(min(len(prompt), len(side) - 1), 0, -1):
        if not _differ(prompt[-count:], side[:count]) and (
                count == len(prompt) or side[0].get("role") != "assistant"):
            return (), side[count:]
    lead, body = leading_system(side), prompt[len(leading_system(prompt)):]
    if lead and all(message.get("role") != "user" for message in side):  # the conversation without its user turn
        return lead, side[len(lead):]
    for start in range(1, len(side) - len(body)) if body else ():
        end = start + len(body)
        if not _differ(body, side[start:end]):
            return side[:start], side[end:]
    return None, side


def _differ(one: Messages, other: Messages) -> bool:
    def key(message: Message) -> tuple[object, str]:
        return message.get("role"), (message.get("content") or "").strip()

    return list(map(key, one)) != list(map(key, other))


def _merged(before: Messages, prompt: Messages, name: str, place: str) -> Messages:
    """The prompt with the messages before it, and one system message."""
    own, theirs = leading_system(prompt), leading_system(before)
    if own and theirs and _differ(own[:1], theirs[:1]):
        raise DataError(f"{place}: the prompt has the system message {fields.short_repr(own[0].get('content'))}, but "
                        f"'{name}' has {fields.short_repr(theirs[0].get('content'))}. Remove one of them.")
    return (*(own or theirs), *before[len(theirs):], *prompt[len(own):])


def _is_other_conversation(prompt: Messages, side: Messages) -> bool:
    """True for a complete conversation where a completion of a user's turn should be."""
    return (prompt[-1].get("role") == "user" and side[0].get("role") in ("user", "system", "developer")
            and side[-1].get("role") == "assistant")
