"""Shows trees and whole generations: in the terminal, and as a page to replay."""

from .replay import Lane, save_html
from .terminal import BARS, CHECK_MARK, EncodableText, draw_tree, encodable

__all__ = ["BARS", "CHECK_MARK", "EncodableText", "Lane", "draw_tree", "encodable", "save_html"]
