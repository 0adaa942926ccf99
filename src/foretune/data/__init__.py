"""What is trained on: rows, their tokens, and which of them carry loss; how long rows are, padded and packed."""

from foretune.data.convert import SOURCE_FORMATS, Converted, SourceFormat, convert_row, convert_rows
from foretune.data.encode import (
    Detail,
    EncodeSettings,
    Example,
    Trait,
    encode_prompt,
    encode_rows,
    format_instruction,
    require_template,
)
from foretune.data.length_files import read_lengths
from foretune.data.lengths import (
    Lengths,
    LengthStats,
    LongRows,
    Packing,
    Padding,
    describe_lengths,
    find_long_rows,
    pack_rows,
    pad_rows,
)
from foretune.data.rows import InstructionRow, Message, MessagesRow, Row, RowProblem, parse_row, read_lines, read_rows
from foretune.data.tokenizer import Encoding, Rendering, TemplateProblem, Tokenizer, TokenizerFacts
from foretune.data.turns import Located, Turn, locate_turns

__all__ = [
    "SOURCE_FORMATS",
    "Converted",
    "Detail",
    "EncodeSettings",
    "Encoding",
    "Example",
    "InstructionRow",
    "LengthStats",
    "Lengths",
    "Located",
    "LongRows",
    "Message",
    "MessagesRow",
    "Packing",
    "Padding",
    "Rendering",
    "Row",
    "RowProblem",
    "SourceFormat",
    "TemplateProblem",
    "Tokenizer",
    "TokenizerFacts",
    "Trait",
    "Turn",
    "convert_row",
    "convert_rows",
    "describe_lengths",
    "encode_prompt",
    "encode_rows",
    "find_long_rows",
    "format_instruction",
    "locate_turns",
    "pack_rows",
    "pad_rows",
    "parse_row",
    "read_lengths",
    "read_lines",
    "read_rows",
    "require_template",
]
