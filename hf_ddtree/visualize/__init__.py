"""Shows trees and whole generations: in the terminal, as a page to replay, and as plots."""

from .plots import plot_stats
from .replay import Lane, save_html
from .terminal import BARS, CHECK_MARK, EncodableText, draw_tree, encodable

__all__ = ["BARS", "CHECK_MARK", "EncodableText", "Lane", "draw_tree", "encodable", "plot_stats", "save_html"]
