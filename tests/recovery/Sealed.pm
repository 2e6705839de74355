# Counts sealed pages in the files of servers.

package Sealed;

use strict;
use warnings;
use Exporter qw(import);
use File::Find ();

use constant PAGE => 8192;

our @EXPORT_OK = qw(look);

# Counts pages in everything that looks like a data directory or a WAL segment.
sub look
{
	my $clusters = 0;
	my %count = map { $_ => { sealed => 0, all => 0, plain => [] } } 'relations', 'wal';
	my $take = sub {
		my ($kind, $sealed, $all) = @_;
		$count{$kind}{sealed} += $sealed;
		$count{$kind}{all}    += $all;
		push @{ $count{$kind}{plain} }, $File::Find::name if $sealed < $all;
	};
	File::Find::find(
		{
			no_chdir => 1,
			wanted   => sub {
				my $path = $File::Find::name;
				return if -l $path || !-f _;
				$clusters++ if $path =~ m{/global/pg_control$};
				# Temporary relations have other names.
				if ($path =~ m{/(?:global|base/\d+|PG_\d+_\d+/\d+)/\d+(?:_fsm|_vm|_init)?(?:\.\d+)?$})
				{
					$take->('relations', relation_pages($path));
				}
				elsif ($path =~ m{/([0-9A-F]{8})([0-9A-F]{8})([0-9A-F]{8})(?:\.partial)?$})
				{
					$take->('wal', wal_pages($path, hex $2, hex $3));
				}
			}
		},
		@_);
	return ($clusters, %count);
}

# The version of the key is in the upper 13 bits of pd_flags.
sub relation_pages
{
	return pages(shift, sub { unpack('v', substr($_[0], 10, 2)) >> 3 });
}

# The mark of the key is in the upper 12 bits of xlp_info. A page whose header contains another
# address is a remnant of an earlier use of the segment.
sub wal_pages
{
	my ($path, $high, $low) = @_;
	my $size = -s $path;
	return (0, 0) if $size == 0 || $size & ($size - 1) || $size < (1 << 20);
	my $start = ($high << 32) + $low * $size;
	return pages(
		$path,
		sub { unpack('v', substr($_[0], 2, 2)) >> 4 },
		sub { unpack('Q<', substr($_[0], 8, 8)) == $start + $_[1] });
}

sub pages
{
	my ($path, $is_sealed, $counts) = @_;
	my ($sealed, $all, $at) = (0, 0, 0);
	my $empty = "\0" x PAGE;
	open my $file, '<:raw', $path or return (0, 0);
	while ((read($file, my $page, PAGE) // 0) == PAGE)
	{
		if ($page ne $empty && (!$counts || $counts->($page, $at)))
		{
			$all++;
			$sealed++ if $is_sealed->($page);
		}
		$at += PAGE;
	}
	close $file;
	return ($sealed, $all);
}

1;
